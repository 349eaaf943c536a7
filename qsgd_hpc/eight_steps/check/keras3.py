"""Features of Keras 2 that Keras 3 does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, behind, replace
from qsgd_hpc.eight_steps.reading import Framework, Script, argument

__all__ = ["check"]

MAKER = r"(tensorflow\.(compat\.v2\.)?keras\.|tensorflow\.|keras\.)optimizers\.(legacy\.)?[A-Z]\w+"
OPTIMIZER = re.compile(rf"^{MAKER}$")
MADE = re.compile(rf"^{MAKER}\(\)$")
LEGACY = re.compile(r"^(tensorflow\.)?keras\.optimizers\.legacy$")
LAYERS = re.compile(r"^tensorflow\.(compat\.v1\.)?layers\.\w+$")
CHECKPOINT = re.compile(r"^(tensorflow\.)?keras\.callbacks\.ModelCheckpoint$")
GENERATORS = {f"{name}_generator": name for name in ("fit", "evaluate", "predict")}
QUEUE = ("workers", "max_queue_size", "use_multiprocessing", "pickle_safe")
# Arguments that were removed, by method.
GONE = {
    **dict.fromkeys(("fit", "evaluate", "predict", *GENERATORS), QUEUE),
    "compile": ("experimental_run_tf_function",),
    "apply_gradients": ("experimental_aggregate_gradients", "skip_gradients_aggregation"),
}


def check(facts: Facts) -> Iterator[Finding]:
    """Yield features that Keras 3 does not have, in scripts that do not request Keras 2."""
    script = facts.script
    modules = {each.module.partition(".")[0] for each in script.imports}
    if not modules & {"tensorflow", "keras"} or "tf_keras" in modules:
        return
    if "TF_USE_LEGACY_KERAS" in script.text:
        return
    for call in script.calls:
        yield from in_call(facts, call)
    for node in script.nodes:
        if isinstance(node, cst.Attribute):
            yield from in_attribute(facts, node)


def found(facts: Facts, node: cst.CSTNode, what: str, remedy: str, *edits: Edit) -> Finding:
    return facts.finding("QH001", node, f"Keras 3 has no {what}", edits=edits, remedy=remedy)


def in_call(facts: Facts, call: cst.Call) -> Iterator[Finding]:
    script, name, method = facts.script, facts.called[call], facts.method(call)
    func = call.func
    if isinstance(func, cst.Attribute):
        trains = Framework.KERAS in script.frameworks
        if method == "variables" and not call.args and is_optimizer(script, func.value):
            edit = Edit(script.end(func), script.end(call), "")
            yield found(facts, call, "variables() of an optimizer", "Leave out the ().", edit)
        if trains or method == "apply_gradients":
            for each in call.args:
                gone = each.keyword.value if each.keyword is not None else ""
                if gone in GONE.get(method, ()):
                    yield found(
                        facts,
                        each,
                        f"{gone}= of {method}",
                        "Leave it out.",
                        *without(script, call, each),
                    )
        if trains and method in GENERATORS:
            yield generator(facts, call, func)
        if method == "save_weights":
            yield from in_file_of_weights(facts, call)
    if OPTIMIZER.match(name):
        yield from in_optimizer(facts, call)
    if LAYERS.match(name):
        remedy = "Use tf.keras.layers, or install tf-keras and set TF_USE_LEGACY_KERAS=1."
        yield found(facts, call, name.replace("tensorflow.", "tf."), remedy)
    if CHECKPOINT.match(name):
        only = argument(call, "save_weights_only")
        whole = only is None or script.code(only) == "False"
        if not whole:
            yield from in_file_of_weights(facts, call)


def in_file_of_weights(facts: Facts, call: cst.Call) -> Iterator[Finding]:
    path = argument(call, "filepath", 0)
    text = path.raw_value if isinstance(path, cst.SimpleString) else ""
    if text.endswith((".h5", ".hdf5")) and not text.endswith(".weights.h5"):
        yield found(facts, call, "weights in a file of this name", "End it in .weights.h5.")


def is_optimizer(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a value is an optimizer of Keras, directly or wrapped."""
    made = script.value(node)
    if isinstance(made, cst.Call) and script.api(made) == "DistributedOptimizer" and made.args:
        return is_optimizer(script, made.args[0].value)
    return bool(MADE.match(script.qualified(made)))


def generator(facts: Facts, call: cst.Call, func: cst.Attribute) -> Finding:
    new = GENERATORS[func.attr.value]
    edits = [replace(facts.script, func.attr, new)]
    for each in call.args:
        if each.keyword is not None and each.keyword.value == "generator":
            edits.append(replace(facts.script, each.keyword, "x"))
    placed = [each for each in call.args if each.keyword is None]
    safe = len(placed) <= 1 and not any(each.star for each in call.args)
    return found(facts, call, func.attr.value, f"Call {new}.", *(edits if safe else ()))


def in_optimizer(facts: Facts, call: cst.Call) -> Iterator[Finding]:
    script = facts.script
    for each in call.args:
        name = each.keyword.value if each.keyword is not None else ""
        if name == "lr" and each.keyword is not None:
            edit = replace(script, each.keyword, "learning_rate")
            yield found(facts, each, "lr= of an optimizer", "Write learning_rate=.", edit)
        elif name == "decay":
            zero = script.code(each.value) in ("0", "0.0", "0.")
            schedule = (
                "Pass learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)."
            )
            remedy = "Leave it out." if zero else schedule
            edits = without(script, call, each) if zero else ()
            yield found(facts, each, "decay= of an optimizer", remedy, *edits)


def in_attribute(facts: Facts, node: cst.Attribute) -> Iterator[Finding]:
    script, name = facts.script, node.attr.value
    if name == "lr" and is_optimizer(script, node.value):
        edit = replace(script, node.attr, "learning_rate")
        yield found(facts, node, "lr of an optimizer", "Write learning_rate.", edit)
    elif name == "legacy" and LEGACY.match(script.qualified(node)):
        edit = Edit(script.end(node.value), script.end(node), "")
        yield found(facts, node, "optimizers.legacy", "Leave out .legacy.", edit)


def without(script: Script, call: cst.Call, arg: cst.Arg) -> tuple[Edit, ...]:
    """Remove an argument from a call."""
    place = next(i for i, each in enumerate(call.args) if each is arg)
    end = behind(script, arg)
    if place:
        return (Edit(behind(script, call.args[place - 1]), end, ""),)
    if len(call.args) > 1:
        return (Edit(script.start(arg), script.start(call.args[1]), ""),)
    return () if isinstance(arg.comma, cst.Comma) else (Edit(script.start(arg), end, ""),)
