"""Conversion of TensorFlow 2 scripts: a custom loop with GradientTape."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening, tf_data, words
from qsgd_hpc.eight_steps.convert.arrays import leave_data, point_out_parts, shard_arrays
from qsgd_hpc.eight_steps.convert.downloads import download_once, prepare_once, wait_for_models
from qsgd_hpc.eight_steps.convert.keras_script import is_optimizer, reseed, scale_optimizer
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, reaching, train_loops, training
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import Steps, is_number, scaled, steps_of
from qsgd_hpc.eight_steps.reading import Script, argument, dotted, receiver
from qsgd_hpc.errors import UsageError

__all__ = ["convert_tf2"]

MEAN = "gradient() returns the mean of all ranks' gradients."


def convert_tf2(plan: Plan) -> None:
    """Add the eight steps to a script with a custom loop."""
    script = plan.script
    gradients = [c for c in script.calls if script.called(c).endswith("GradientTape().gradient")]
    applies = [c for c in script.calls if script.called(c).endswith(".apply_gradients")]
    loops = train_loops(script, applies or gradients)
    if not gradients or not loops:
        raise UsageError(
            f"{script.path}: TensorFlow 2, but no training loop: looked for a call of "
            "tape.gradient() that a for or while repeats"
        )
    for loop in loops:
        _data(plan, loop)
    point_out_parts(plan, loops)
    optimizers = [call for call in script.calls if is_optimizer(script, call)]
    steps = _steps(plan, loops)
    for call in optimizers:
        _rate(plan, call, steps)
    if not optimizers:
        plan.todo(loops[0].loop, words.SCALE_IT)
    _wrap_tapes(plan, gradients)
    for call in script.calls:
        if receiver(call, "minimize"):
            plan.todo(call, "average the gradients: use tape.gradient() and apply_gradients().")
    _broadcast(plan, loops, gradients, applies)
    for loop in loops:
        average_metrics(plan, loop, summed=_updated(script, loop))
    _sum_metrics(plan, loops)
    _writers(plan)
    reseed(plan)
    opening.agree_on_random_numbers(plan)
    trained = training(script, loops)
    download_once(plan, trained, "hvd.barrier()")
    wait_for_models(plan, trained, "hvd.barrier()")
    guarded = guard_outputs(plan, reaching(script, [*gradients, *applies, *optimizers]))
    prepare_once(plan, guarded, trained, "hvd.barrier()")
    tf = script.name_of("tensorflow")
    more = opening.imports_of(script, "tensorflow") if tf else ["import tensorflow as tf"]
    opening.open_script(plan, "qsgd_hpc.tensorflow", more, tf_data.pin_tensorflow(tf or "tf"))


def _data(plan: Plan, loop: TrainLoop) -> None:
    script = plan.script
    over = iterable(script, loop.loop)
    if over is not None and tf_data.is_dataset(script, over):
        tf_data.shard_dataset(plan, over, loop.loop)
        tf_data.takes(plan, over)
    elif not shard_arrays(plan, loop):
        if over is not None:
            tf_data.takes(plan, over)
        leave_data(plan, loop)


UNSIZED = re.compile(
    r"\.(repeat|filter|flat_map|interleave|unbatch|take_while|bucket_by_sequence_length"
    r"|rejection_resample|from_generator|make_csv_dataset|(TFRecord|TextLine|Csv|Sql)Dataset)$"
)


def _steps(plan: Plan, loops: tuple[TrainLoop, ...]) -> Steps:
    """Return the known number of steps of an epoch; TensorFlow does not know that of all data."""
    script = plan.script
    unsized = any(UNSIZED.search(script.called(call)) for call in script.calls)
    data = any(
        tf_data.is_dataset(script, over)
        for over in (iterable(script, loop.loop) for loop in loops)
        if over is not None
    )
    return steps_of(script, loops, (), loaded=data and not unsized)


def _rate(plan: Plan, call: cst.Call, steps: Steps) -> None:
    """Warm up an optimizer's rate, unless the script changes it."""
    script = plan.script
    rate = argument(call, "learning_rate", 0)
    tf = script.name_of("tensorflow")
    place, count = steps.at(plan, plan.anchor(call), later=False)
    sets = any(
        isinstance(n, cst.AssignTarget)
        and script.code(n.target).endswith((".learning_rate", ".lr"))
        for n in script.nodes
    ) or any(script.called(c).endswith("learning_rate.assign") for c in script.calls)
    if rate is None or not tf or place is None or sets or not is_number(script, rate):
        if scale_optimizer(plan, call):
            plan.todo(call, words.RAISE_IT)
        return
    plan.step(4, f"{words.LINEAR} {words.RISE}", call)
    schedule = f"{tf}.keras.optimizers.schedules.PolynomialDecay"
    plan.replace(rate, f"{schedule}({script.code(rate)}, {count}, {scaled(script, rate)})")


def _wrap_tapes(plan: Plan, gradients: Sequence[cst.Call]) -> None:
    """Wrap each tape once, before its first gradient and outside of later branches and loops."""
    script = plan.script
    done: set[cst.CSTNode] = set()
    for call in gradients:
        assert isinstance(call.func, cst.Attribute)
        _not_in_xla(plan, call)
        tape = script.binding(call.func.value)
        statement: cst.CSTNode = plan.anchor(call)
        if tape is not None and tape.how == "with":
            recorded = script.statement(tape.at)
            inside = recorded in script.ancestors(statement)
            block = cst.ensure_type(recorded, cst.With).body if inside else script.parents[recorded]
            around = (statement, *script.ancestors(statement))
            statement = next((n for n in around if script.parents.get(n) is block), statement)
        made = statement if tape is None else tape.at
        if made not in done:
            name = script.code(call.func.value)
            plan.step(5, MEAN, statement, f"{name} = hvd.DistributedGradientTape({name})")
        done.add(made)


def _not_in_xla(plan: Plan, call: cst.Call) -> None:
    for function in plan.script.functions(call):
        for decorator in function.decorators:
            if "jit_compile" in plan.script.code(decorator):
                plan.todo(function, "XLA cannot wait for other ranks: leave out jit_compile.")


def _writers(plan: Plan) -> None:
    """Let only rank 0 write summaries."""
    script = plan.script
    for call in script.calls:
        if script.called(call) == "tensorflow.summary.create_file_writer":
            tf = script.code(call.func).rpartition(".create_file_writer")[0]
            plan.step(7, words.PRINTED, call, once=True)
            plan.wrap(call, "", f" if hvd.rank() == 0 else {tf}.create_noop_writer()")


METRIC = re.compile(r"^(keras|tensorflow\.keras)\.metrics\.[A-Z]\w*\(\)(\.update_state)?$")
METRICS_TEXT = (
    "The metrics cover this rank's shard; with the sums of all ranks they cover all data."
)


def _sum_metrics(plan: Plan, loops: Sequence[TrainLoop]) -> None:
    """Sum the state of each loop's metrics over the ranks, after the loop."""
    script = plan.script
    tf = script.name_of("tensorflow") or "tf"
    for loop in loops:
        names = _updated(script, loop)
        kept = [name for name in names if not _is_reset(script, name)]
        outer = loop.epochs is not None or script.function(loop.loop) is not None
        if kept and outer:
            plan.todo(loop.loop, f"average over the ranks: {', '.join(kept)}.")
            names = [name for name in names if name not in kept]
        if names:
            given = f"({', '.join(names)})" if len(names) > 1 else f"({names[0]},)"
            each = "each_metric" if re.search(r"\bmetric\b", script.text) else "metric"
            plan.after(
                loop.loop,
                *plan.comment(8, METRICS_TEXT, loop.loop),
                f"for {each} in {given}:",
                f"    for value in {each}.variables:",
                f"        value.assign(hvd.allreduce({tf}.convert_to_tensor(value), op=hvd.Sum))",
            )


def _updated(script: Script, loop: TrainLoop) -> list[str]:
    called = script.definition(loop.step)
    found = []
    for call in script.calls:
        here = loop.loop in script.ancestors(call) or (called and called in script.ancestors(call))
        if here and METRIC.match(script.called(call)):
            found.append(dotted(receiver(call, "update_state") or call.func))
    return list(dict.fromkeys(name for name in found if name))


def _is_reset(script: Script, name: str) -> bool:
    for call in script.calls:
        metric = receiver(call, "reset_state", "reset_states")
        bound = script.binding(metric) if metric is not None else None
        over = bound.value if bound is not None and bound.how == "for" else None
        if dotted(metric) == name or (over is not None and name in script.code(over)):
            return True
    return False


BROADCAST_TEXT = "After the first step, when all variables exist, every rank takes rank 0's values."


def _broadcast(
    plan: Plan,
    loops: Sequence[TrainLoop],
    gradients: Sequence[cst.Call],
    applies: Sequence[cst.Call],
) -> None:
    """Broadcast the variables of the model and of the optimizer in each training loop."""
    script = plan.script
    for loop in loops:
        given = [_variables(plan, loop, c) for c in gradients if _belongs(script, loop, c)]
        stepped = [receiver(c) for c in applies if _belongs(script, loop, c)]
        optimizers = [_translated(script, loop, each) for each in stepped if each is not None]
        outer = loop.epochs or loop.loop
        if not given or None in given or None in optimizers:
            plan.todo(loop.loop, "broadcast all variables from rank 0 after the first step.")
            continue
        named = dict.fromkeys([g for g in given if g] + [f"{o}.variables" for o in optimizers])
        calls = [f"hvd.broadcast_variables({name}, root_rank=0)" for name in named]
        if not applies:
            plan.step(6, words.ALIKE, outer, *calls)
            continue
        body = loop.loop.body.body
        index = script.position(loop.step, body)
        plan.before(outer, "broadcast_done = False")
        plan.after(
            body[index],
            *plan.comment(6, BROADCAST_TEXT, body[index]),
            "if not broadcast_done:",
            *(f"    {call}" for call in calls),
            "    broadcast_done = True",
        )


def _belongs(script: Script, loop: TrainLoop, call: cst.Call) -> bool:
    """Return whether a call is made in a loop, or in the function that the loop's step calls."""
    if loop.loop in script.ancestors(call):
        return True
    called = script.definition(loop.step)
    return called is not None and called in script.ancestors(call)


def _variables(plan: Plan, loop: TrainLoop, call: cst.Call) -> str | None:
    """Return the variables that are differentiated, by their names in the loop's function."""
    script = plan.script
    if len(call.args) < 2:
        return None
    node: cst.CSTNode = call.args[1].value
    made = script.value(node)
    text = script.code(made)
    found = re.fullmatch(r"([\w.]+)\.trainable_(variables|weights)", text)
    if found and isinstance(made, cst.Attribute):
        owner = _translated(script, loop, made.value)
        return f"{owner}.variables" if owner else None
    if dotted(node):
        return _translated(script, loop, node)
    if isinstance(node, cst.List | cst.Tuple):
        parts = [_translated(script, loop, each.value) for each in node.elements]
        return f"[{', '.join(p for p in parts if p)}]" if all(parts) else None
    return None


def _translated(script: Script, loop: TrainLoop, node: cst.CSTNode) -> str | None:
    """Return the name in the loop's function of a name in the step's function."""
    name = dotted(node)
    here, there = script.function(node), script.function(loop.loop)
    if not name or name.count(".") > 1:
        return None
    if here is there:
        return name
    if name.startswith("self."):
        return name if script.class_of(node) is script.class_of(loop.loop) else None
    found = script.binding(node)
    if found is None:
        return None
    if found.how == "parameter":
        owner = script.definition(loop.step)
        method = owner is not None and script.class_of(owner) is not None
        given = argument(loop.step, found.name, found.index - method)
        return (dotted(given) or None) if given is not None else None
    around = [script.module, *([there] if there else [])]
    return name if any(scope is script.scope(found.at) for scope in around) else None
