"""Conversion of Keras scripts: model.compile and model.fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening, tf_data, words
from qsgd_hpc.eight_steps.convert.arrays import slice_of
from qsgd_hpc.eight_steps.convert.downloads import download_once, prepare_once, wait_for_models
from qsgd_hpc.eight_steps.convert.loops import callers, reaching, sources
from qsgd_hpc.eight_steps.convert.plan import ARGUMENT, Edit, Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import is_number, scale, scaled
from qsgd_hpc.eight_steps.convert.torch_data import LOADER
from qsgd_hpc.eight_steps.reading import Script, argument, dotted, find, is_literal, receiver
from qsgd_hpc.errors import UsageError

__all__ = ["convert_keras", "is_optimizer", "reseed", "scale_optimizer"]

OWN_FIT = re.compile(r"^sklearn\.|Scaler\(\)\.fit$|Encoder\(\)\.fit$|PCA\(\)\.fit$")
SEED = re.compile(
    r"^(keras\.utils|tensorflow\.keras\.utils)\.set_random_seed$|^tensorflow\.random\.set_seed$"
)
OPTIMIZER = re.compile(r"^(keras|tensorflow(\.keras)?)\.optimizers\.(legacy\.)?[A-Z]\w*$")
# Default rates of the optimizers.
RATES: Mapping[str, str] = {
    "Adadelta": "0.001", "Adafactor": "0.001", "Adagrad": "0.001", "Adam": "0.001",
    "AdamW": "0.001", "Adamax": "0.001", "Ftrl": "0.001", "Lion": "0.001", "Nadam": "0.001",
    "RMSprop": "0.001", "SGD": "0.01",
}  # fmt: skip
# Data sets whose number of batches is unknown before they are read.
UNSIZED = re.compile(r"(TFRecord|TextLine|Csv)Dataset|make_csv_dataset|\.from_generator$")
SEQUENCE = (
    "shard this Sequence: let its __len__ return 1 / hvd.size() of its batches, and __getitem__(i) "
    "the batch i * hvd.size() + hvd.rank()."
)
SAMPLE_IT = (
    "give this loader sampler=torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank()), "
    "and call its set_epoch(epoch) in a callback."
)


def convert_keras(plan: Plan) -> None:
    """Add the eight steps to a script that calls fit."""
    script = plan.script
    calls = [c for c in script.calls if script.called(c).endswith(".compile")]
    own = {c: made for c in calls if (made := _own_optimizers(script, c))}
    models = [c for c in calls if _is_model(c) and c not in own]
    compiles = [c for c in models if not _passes_on(script, c)] or models
    fits = [c for c in script.calls if _fits_model(script, c, [*compiles, *own])]
    if not fits or not (compiles or own):
        raise UsageError(
            f"{script.path}: Keras, but no model.compile(optimizer=...) with a model.fit(x, ...)"
        )
    warm_ups = [_distribute(plan, call) for call in compiles]
    for call in calls:
        if call in own:
            _distribute_all(plan, call, own[call])
        elif _may_be_model(script, call):
            plan.todo(call, "pass a hvd.DistributedOptimizer for each optimizer of this model.")
            warm_ups.append("?")
    _name_own_steps(plan, bool(own))
    changes = not all(warm_ups) or _own_schedule(script)
    if changes:
        plan.todo(
            fits[0],
            "the script sets the learning rate: the values must be hvd.size() times larger too, "
            "after a warm-up.",
        )
    several = {script.code(model) for c in own if (model := receiver(c))}
    unsized = any(UNSIZED.search(script.called(c)) for c in script.calls)
    for fit in fits:
        _data(plan, fit)
        _quiet(plan, fit)
        rate = warm_ups[0] if len(set(warm_ups)) == 1 else "?"
        model = receiver(fit)
        warms_up = not changes and (model is None or script.code(model) not in several)
        if rate == "?" and model is not None:
            rate = f"float({script.code(model)}.optimizer.learning_rate)"
        callback = f"hvd.callbacks.LearningRateWarmupCallback({rate}, warmup_epochs=1)"
        if warms_up and unsized and find(fit, "steps_per_epoch") is None:
            plan.todo(fit, "pass steps_per_epoch= to the warm-up: Keras may not know the number.")
        _add_callbacks(
            plan, fit, callback if warms_up else "", _keeps_list(script, fit, fits, rate)
        )
    for call in script.calls:
        called = script.called(call)
        if called.endswith((".evaluate", ".predict")) and script.definition(call) is None:
            _quiet(plan, call)
        elif called.endswith(".callbacks.BackupAndRestore") and call not in plan.removed:
            plan.todo(call, "only rank 0 may have this, before BroadcastGlobalVariablesCallback.")
    reseed(plan)
    opening.agree_on_random_numbers(plan)
    wait = "hvd.allgather_object(None)"
    trained = [*fits, *callers(script, fits)]
    download_once(plan, trained, wait)
    wait_for_models(plan, trained, wait)
    guarded = guard_outputs(plan, reaching(script, [*fits, *compiles]))
    prepare_once(plan, guarded, trained, wait)
    keras = script.name_of("keras")
    needed = keras_needed(plan)
    more = opening.imports_of(script, "tensorflow") if script.name_of("tensorflow") else []
    if needed:
        more += ["import keras"] if keras != "keras" else opening.imports_of(script, "keras")
    opening.open_script(plan, "qsgd_hpc.keras", more, tf_data.pin_lines(script))


def keras_needed(plan: Plan) -> bool:
    """Return whether the inserted code needs the name `keras`."""
    pinned = not plan.script.name_of("tensorflow")
    return pinned or any("DistributedOptimizer(keras." in edit.text for edit in plan.edits)


def _fits_model(script: Script, call: cst.Call, compiles: Sequence[cst.Call]) -> bool:
    """Return whether a `fit` trains a model; those of scalers and encoders have one argument."""
    fitted = receiver(call, "fit")
    if fitted is None or OWN_FIT.search(script.called(call)) or script.definition(call):
        return False
    if len(call.args) > 1 or find(call, "x"):
        return True
    models = {script.code(model) for each in compiles if (model := receiver(each))}
    data = argument(call, "x", 0)
    return data is not None and (script.code(fitted) in models or tf_data.is_dataset(script, data))


def _is_model(call: cst.Call) -> bool:
    return bool(find(call, "optimizer", 0) or find(call, "loss", 1))


def _passes_on(script: Script, call: cst.Call) -> bool:
    """Return whether a class's own `compile` passes the optimizer that it is given to Keras's."""
    given, function = argument(call, "optimizer", 0), script.function(call)
    if given is None or function is None or function.name.value != "compile":
        return False
    bound = script.binding(given)
    return bound is not None and bound.how == "parameter"


def _own_optimizers(script: Script, call: cst.Call) -> tuple[cst.BaseExpression, ...]:
    """Return the optimizers in a call of a model's own `compile`, which takes several."""
    given = [a.value for a in call.args if is_optimizer(script, script.value(a.value))]
    alone = len(given) == 1 and argument(call, "optimizer", 0) is given[0]
    return () if alone else tuple(given)


def _may_be_model(script: Script, call: cst.Call) -> bool:
    """Return whether a `compile` may be a model's whose optimizers are not recognised."""
    hidden = any(a.star == "**" or (a.keyword and "optim" in a.keyword.value) for a in call.args)
    return hidden and not _is_model(call) and not script.called(call).startswith("super()")


def _name_own_steps(plan: Plan, own: bool) -> None:
    """Leave loops with a step of their own, beside `fit`, to the author.

    Args:
        plan: the plan to extend.
        own: whether a model has a compile of its own, whose optimizers its train_step uses.
    """
    script = plan.script
    for call in script.calls:
        optimizer = receiver(call, "apply_gradients")
        # compile wraps the optimizer of a model, which is self.optimizer in its train_step.
        in_model = own and script.class_of(call) is not None
        known = optimizer is None or script.code(optimizer).endswith(".optimizer")
        if not known and not in_model:
            plan.todo(call, "wrap this optimizer, and shard the data of its loop.")


def _own_schedule(script: Script) -> bool:
    """Return whether a callback or the script itself sets the learning rate."""
    scheduled = any(script.called(c).endswith(".LearningRateScheduler") for c in script.calls)
    rates = ("optimizer.learning_rate", "optimizer.lr")
    assigned = any(
        isinstance(n, cst.AssignTarget) and script.code(n.target).endswith(rates)
        for n in script.nodes
    )
    return scheduled or assigned


def _data(plan: Plan, fit: cst.Call) -> None:
    script = plan.script
    x, y = argument(fit, "x", 0), argument(fit, "y", 1)
    steps = argument(fit, "steps_per_epoch")
    if steps is not None:
        plan.replace(steps, f"{script.operand(steps)} // hvd.size()")
    if x is None:
        plan.todo(fit, words.SHARD_IT)
    elif any(LOADER.match(script.called(each)) for each in sources(script, x)):
        plan.todo(fit, SAMPLE_IT)
    elif any(_is_sequence(script, each) for each in sources(script, x)):
        plan.todo(fit, SEQUENCE)
    elif tf_data.is_dataset(script, x) or (y is None and find(fit, "batch_size") is None):
        tf_data.shard_dataset(plan, x, fit)
    else:
        given = [each for each in (x, y, argument(fit, "sample_weight")) if each is not None]
        arrays = [_arrays(script, each) for each in given]
        if not arrays[0] or not all(arrays) or not all(dotted(each) for each in arrays[0]):
            plan.todo(fit, words.SHARD_IT)
            return
        plan.step(3, words.SHARD, fit, f"shard = {slice_of(dotted(arrays[0][0]))}")
        for part in (each for several in arrays for each in several):
            text = script.code(part)
            plan.replace(part, f"{text}[shard]" if dotted(part) else f"({text})[shard]")


def _arrays(script: Script, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the arrays of an input, several of which are in a list or dict; [] if unknown."""
    if isinstance(node, cst.List | cst.Tuple):
        found = [each.value for each in node.elements if isinstance(each, cst.Element)]
    elif isinstance(node, cst.Dict):
        found = [each.value for each in node.elements if isinstance(each, cst.DictElement)]
    else:
        return [] if _several(script, node) else [node]
    known = len(found) == len(node.elements) and all(dotted(each) for each in found)
    return found if known and not any(_several(script, each) for each in found) else []


def _is_sequence(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether an expression makes an object of the script's own class of batches."""
    return any(re.search(r"\.utils\.(Sequence|PyDataset)$", each) for each in script.bases(node))


def _several(script: Script, x: cst.BaseExpression) -> bool:
    """Return whether inputs are several arrays, or generated in batches."""
    kinds = (cst.List, cst.Dict, cst.Tuple)
    return any(
        isinstance(each, kinds) or re.search(r"Generator|\.flow", script.qualified(each))
        for each in sources(script, x)
    )


def _quiet(plan: Plan, call: cst.Call) -> None:
    """Let only rank 0 show progress."""
    script = plan.script
    given = argument(call, "verbose")
    if given is not None and script.code(given) == "0":
        return
    plan.step(7, words.PROGRESS, call, once=True)
    if given is None:
        plan.add_argument(call, 'verbose="auto" if hvd.rank() == 0 else 0')
    else:
        plan.replace(given, f"{script.code(given)} if hvd.rank() == 0 else 0")


def reseed(plan: Plan) -> None:
    """Give each rank another seed, for dropout, unless ranks must draw equal numbers."""
    script = plan.script
    alike = plan.alike or any(
        opening.NUMPY.match(script.called(c))
        or re.match(
            r"^tensorflow\.random\.(normal|uniform|shuffle|stateless\w+)$", script.called(c)
        )
        or opening.is_open_split(script, c)
        or re.match(r"^random\.\w+$", script.called(c))
        for c in script.calls
    )
    if alike:
        return
    for call in script.calls:
        if SEED.match(script.called(call)) and len(call.args) == 1:
            seed = call.args[0].value
            plan.before(
                call, "# Each rank draws its own dropout; the initial weights are those of rank 0."
            )
            text = script.operand(seed)
            plan.replace(seed, "hvd.rank()" if text == "0" else f"{text} + hvd.rank()")


WRITERS = re.compile(
    r"\.callbacks\.(ModelCheckpoint|CSVLogger|TensorBoard|RemoteMonitor"
    r"|SwapEMAWeights)$|^(wandb|mlflow|tqdm)\."
)
TEXTS = (
    (6, "The broadcast callback gives every rank rank 0's variables before the first batch."),
    (8, "The average callback replaces a rank's metrics by those of all ranks."),
    (4, "The warm-up callback raises the rate to that of all ranks over the first epoch."),
)


def writes(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a callback that writes files."""
    return bool(WRITERS.search(script.called(script.value(node))))


def _keeps_list(script: Script, fit: cst.Call, fits: Sequence[cst.Call], rate: str) -> bool:
    """Return whether the list of a call's callbacks cannot have the warm-up.

    It serves another fit, too, or is made before the model has the rate of this one.
    """
    given = argument(fit, "callbacks", 5)
    known = sources(script, given)[0] if given is not None else None
    if not isinstance(known, cst.List) or known is given:
        return False
    lists = [argument(each, "callbacks", 5) for each in fits if each is not fit]
    shared = any(known in sources(script, each) for each in lists if each is not None)
    start, scope = script.start(known), script.scope(known)
    compiles = [c for c in script.calls if script.called(c).endswith(".compile")]
    beside = [script.start(c) for c in compiles if script.scope(c) is scope]
    models = script.bindings.get((scope, dotted(receiver(fit))), ())
    early = min(beside, default=start) > start or all(script.start(b.at) > start for b in models)
    return shared or (".optimizer." in rate and early)


def _add_callbacks(plan: Plan, fit: cst.Call, warm_up: str, keeps_list: bool) -> None:
    """Add the callbacks of this package to a call of fit, before the script's own callbacks.

    Args:
        plan: the plan to extend.
        fit: the call.
        warm_up: the callback that warms up the rate, as Python code, or "".
        keeps_list: whether they precede the script's list in the call, not within the list.
    """
    ours = [
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
        "hvd.callbacks.MetricAverageCallback()",
        *([warm_up] if warm_up else []),
    ]
    given = argument(fit, "callbacks", 5)
    texts = TEXTS if warm_up else TEXTS[:2]
    if given is None:
        _explain(plan, fit, texts)
        end = fit.args[-1].value if fit.args else fit
        indent = plan.line_indentation(plan.script.end(end)[0])
        plan.add_argument(fit, f"callbacks=[{_lines(plan, ours, indent)}]")
        return
    known, *more = sources(plan.script, given)
    if isinstance(known, cst.List):
        ours = [*_backups(plan, known), *ours]
    if not isinstance(known, cst.List) or more:
        _explain(plan, fit, texts)
        plan.wrap(given, f"[{', '.join(ours)}, *(", ")]")
        plan.todo(fit, "only rank 0 may have callbacks that write files.")
    elif keeps_list:
        _explain(plan, fit, texts)
        plan.wrap(given, f"[{', '.join(ours)}, *", "]")
        _write_once(plan, known)
    else:
        _extend(plan, known, ours, texts)
    _appended(plan, given)


def _backups(plan: Plan, known: cst.List) -> list[str]:
    """Take BackupAndRestore out of a list: rank 0's, before the broadcast of what it restores."""
    script, found = plan.script, []
    elements = list(known.elements)
    for at, element in enumerate(elements):
        given, made = element.value, script.value(element.value)
        if not script.called(made).endswith(".callbacks.BackupAndRestore"):
            continue
        found.append(f"*([{script.code(given)}] if hvd.rank() == 0 else [])")
        if given in plan.removed:
            continue
        plan.removed |= {given, made}
        plan.step(7, "Rank 0 restores the epoch, and the others get it from it.", known)
        start, end = script.span(given)
        if at + 1 < len(elements):
            end = script.span(elements[at + 1].value)[0]
        elif at:
            start = script.span(elements[at - 1].value)[1]
        elif isinstance(element.comma, cst.Comma):
            end = script.text.index(",", end) + 1
        plan.edits.append(Edit(start, end, ""))
    return found


def _explain(plan: Plan, at: cst.CSTNode, texts: Sequence[tuple[int, str]]) -> None:
    for number, text in texts:
        plan.step(number, text, at)


def _extend(plan: Plan, known: cst.List, ours: list[str], texts: Sequence[tuple[int, str]]) -> None:
    script = plan.script
    _explain(plan, known, texts)
    after_bracket = script.offset(script.start(known)) + 1
    before_bracket = script.offset(script.end(known)) - 1
    first, last = script.line(known), script.end(known)[0]
    indent = plan.line_indentation(first)
    if not known.elements:
        plan.insert(after_bracket, _lines(plan, ours, indent))
    elif script.line(known.elements[0].value) > first:  # each on a separate line
        line = script.line(known.elements[0].value)
        inner = plan.line_indentation(line)
        plan.insert(script.offset((line, 0)), "".join(f"{inner}{x},{plan.newline}" for x in ours))
    elif first == last:
        inner = indent + script.module.default_indent
        plan.insert(after_bracket, _lines(plan, ours, indent).rstrip() + plan.newline + inner)
        empty = len(known.elements) == 1 and known.elements[0].value in plan.removed
        comma = "" if isinstance(known.elements[-1].comma, cst.Comma) or empty else ","
        plan.insert(before_bracket, f"{comma}{plan.newline}{indent}", ARGUMENT)
    else:
        plan.insert(after_bracket, f"{', '.join(ours)}, ")
    _write_once(plan, known)


def _write_once(plan: Plan, known: cst.List) -> None:
    """Let only rank 0 have the callbacks of a list that write files; once for several fits."""
    for element in known.elements:
        if writes(plan.script, element.value) and element.value not in plan.written:
            plan.written.add(element.value)
            plan.step(7, words.WRITTEN, known, once=True)
            plan.wrap(element.value, "*([", "] if hvd.rank() == 0 else [])")


def _lines(plan: Plan, items: list[str], indent: str) -> str:
    """Return the text between the brackets of a list with each item on a separate line."""
    inner = indent + plan.script.module.default_indent
    return "".join(f"{plan.newline}{inner}{item}," for item in items) + plan.newline + indent


def _appended(plan: Plan, given: cst.BaseExpression) -> None:
    """Let only rank 0 append callbacks that write files to the list."""
    script = plan.script
    for call in script.calls:
        if (
            dotted(receiver(call, "append")) == dotted(given) != ""
            and len(call.args) == 1
            and writes(script, call.args[0].value)
        ):
            lines = plan.comment(7, words.WRITTEN, call, once=True)
            plan.under([plan.anchor(call)], "if hvd.rank() == 0:", *lines)


def is_optimizer(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression makes an optimizer of Keras."""
    return bool(OPTIMIZER.match(script.called(node)))


def scale_optimizer(plan: Plan, call: cst.Call) -> str:
    """Multiply the rate of an optimizer by the number of ranks.

    Returns:
        The new rate as Python code; "?" if it contains names, "" if it is no number.
    """
    script = plan.script
    rate = argument(call, "learning_rate", 0)
    if rate is None:
        default = RATES.get(script.called(call).rpartition(".")[2])
        if default is None:
            plan.todo(call, "multiply the learning rate by hvd.size().")
            return ""
        plan.add_argument(call, f"learning_rate={default} * hvd.size()")
        plan.step(4, words.LINEAR, call, once=True)
        return f"{default} * hvd.size()"
    if not is_number(script, rate):
        plan.todo(call, words.SCHEDULE)
        return ""
    scale(plan, rate)
    plan.step(4, words.LINEAR, call, once=True)
    return scaled(script, rate) if is_literal(rate) else "?"


def _distribute(plan: Plan, compile_: cst.Call) -> str:
    """Scale and wrap the optimizer of a call of compile; returns as `scale_optimizer` does."""
    script = plan.script
    given = argument(compile_, "optimizer", 0)
    if given is None:
        return _named(plan, compile_, None, "RMSprop")
    if isinstance(given, cst.SimpleString):
        names = {name.lower(): name for name in RATES}
        return _named(plan, compile_, given, names.get(str(given.raw_value).lower(), ""))
    made = script.value(given)
    plan.step(5, words.MEAN, compile_)
    plan.wrap(given, "hvd.DistributedOptimizer(", ")")
    if isinstance(made, cst.SimpleString):
        plan.todo(compile_, "give the optimizer a learning rate times hvd.size().")
        return ""
    if isinstance(made, cst.Call) and is_optimizer(script, made):
        return scale_optimizer(plan, made)
    plan.todo(compile_, "multiply the learning rate by hvd.size() where the optimizer is made.")
    return "?"


def _distribute_all(
    plan: Plan, compile_: cst.Call, optimizers: Sequence[cst.BaseExpression]
) -> None:
    """Scale and wrap all optimizers of a call of a model's own compile."""
    plan.step(5, words.MEAN, compile_)
    for given in optimizers:
        plan.wrap(given, "hvd.DistributedOptimizer(", ")")
        scale_optimizer(plan, cst.ensure_type(plan.script.value(given), cst.Call))
    plan.todo(compile_, "raise these learning rates over a warm-up.")


def _named(plan: Plan, compile_: cst.Call, given: cst.SimpleString | None, name: str) -> str:
    """Replace an optimizer's name by a wrapped optimizer of that name."""
    rate = RATES.get(name)
    if rate is None:
        plan.todo(compile_, "give compile a hvd.DistributedOptimizer.")
        return ""
    rate = f"{rate} * hvd.size()"
    made = f"hvd.DistributedOptimizer(keras.optimizers.{name}({rate}))"
    plan.step(4, words.LINEAR, compile_)
    plan.step(5, words.MEAN, compile_)
    if given is not None:
        plan.replace(given, made)
    elif find(compile_, "optimizer") is None:
        plan.add_argument(compile_, f"optimizer={made}")
    return rate
