"""Step 6: every rank starts with the weights and the optimizer state of rank 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, Severity, add_argument, insert_after
from qsgd_hpc.eight_steps.check.optimizer import OTHER_WAYS, TAPES, WRAPPERS, constructors
from qsgd_hpc.eight_steps.check.reach import guarded
from qsgd_hpc.eight_steps.reading import Framework, Script, argument, dotted, receiver

__all__ = ["check"]

OF_STATE = (
    "broadcast_parameters", "broadcast_optimizer_state", "broadcast_variables",
    "broadcast_global_variables",
)  # fmt: skip
IN_TIME = (  # wherever they are in the text
    "BroadcastGlobalVariablesHook", "BroadcastGlobalVariablesCallback", "broadcast", "broadcast_",
    "TorchState", "KerasState", "TensorFlowState", "TensorFlowKerasState", "JaxState",
    "ObjectState",
)  # fmt: skip
OTHERS = (*IN_TIME, "broadcast_async_", "broadcast_object", "broadcast_object_fn")
LOADS = ("load_state_dict", "load_weights")
SEEDS = ("manual_seed", "set_random_seed", "set_seed", "seed_everything", "PRNGKey", "key")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of step 6."""
    if not facts.trains:
        return
    yield from check_missing(facts)
    yield from check_late(facts)
    yield from check_early(facts)
    yield from check_state(facts)


def check_missing(facts: Facts) -> Iterator[Finding]:
    weights = (name for name in OF_STATE if name != "broadcast_optimizer_state")
    if facts.uses(*weights, *OTHERS) or facts.mentions(*OTHER_WAYS):
        return
    wraps = facts.calls(*WRAPPERS, *TAPES)
    where = wraps[0] if wraps else facts.events[facts.training[0]].call
    same = seeded_alike(facts)
    reason = "the ranks start with different weights"
    if same:
        reason = "the ranks start equal only as long as one seed gives all the same weights"
    yield facts.finding(
        "QH601",
        where,
        reason,
        severity=Severity.WARNING if same else None,
        edits=missing_edits(facts),
        absent=True,
    )


def seeded_alike(facts: Facts) -> bool:
    """Return whether all ranks draw their weights from the same seed."""
    seeds = [call for call in facts.script.calls if facts.method(call) in SEEDS and call.args]
    return bool(seeds) and not any(facts.reach(*(a.value for a in c.args)).shares() for c in seeds)


def missing_edits(facts: Facts) -> tuple[Edit, ...]:
    kinds = facts.script.frameworks
    if Framework.TORCH in kinds:
        return torch_edits(facts)
    if Framework.KERAS in kinds and Framework.TF2 not in kinds:
        return keras_edits(facts)
    return ()


def torch_edits(facts: Facts) -> tuple[Edit, ...]:
    """Return the edits that broadcast after the optimizer is wrapped."""
    script, hvd = facts.script, facts.script.alias
    wraps = facts.calls("DistributedOptimizer")
    if len(wraps) != 1:
        return ()
    optimizer = dotted(script.assigned(wraps[0]))
    model = wrapped_model(facts, wraps[0])
    if not optimizer or not model:
        return ()
    lines = [f"{hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)"]
    if not facts.uses("broadcast_optimizer_state"):
        lines.append(f"{hvd}.broadcast_optimizer_state({optimizer}, root_rank=0)")
    return insert_after(script, wraps[0], *lines)


def wrapped_model(facts: Facts, wrap: cst.Call) -> str:
    """Return the name of the model whose parameters an optimizer updates."""
    named = argument(wrap, "named_parameters", 1)
    calls: list[cst.BaseExpression | None] = [named]
    calls += [argument(c, "params", 0) for c in constructors(facts) if c in facts.reach(wrap).calls]
    for given in calls:
        if (model := receiver(given, "named_parameters", "parameters")) is not None:
            return dotted(model)
    return ""


def callbacks_module(facts: Facts) -> str:
    """Return the script's name for the module of callbacks, "" if it has none."""
    for each in facts.script.imports:
        if each.module.endswith(".callbacks") and each in facts.script.distributed and each.alias:
            return each.alias
    for each in facts.script.distributed:
        if each.module.endswith("keras") and each.alias:
            return f"{each.alias}.callbacks"
    return ""


def fit_of(facts: Facts) -> cst.Call | None:
    fits = [facts.events[i].call for i in facts.training]
    return next((call for call in fits if facts.method(call) == "fit"), None)


def add_callback(facts: Facts, text: str) -> tuple[Edit, ...]:
    """Return the edits that insert a callback at the start of fit's list, or add a list."""
    fit = fit_of(facts)
    if fit is None or any(each.star for each in fit.args):
        return ()
    script = facts.script
    given = argument(fit, "callbacks")
    if given is None:
        return (add_argument(script, fit, f"callbacks=[{text}]"),)
    made = script.value(given)
    if not isinstance(made, cst.List):
        return ()
    line, column = script.start(made)
    inside = f"{text}, " if made.elements else text
    if made.elements and script.line(made.elements[0].value) > line:
        indent = " " * script.start(made.elements[0].value)[1]
        inside = f"{script.module.default_newline}{indent}{text},"
    return (Edit((line, column + 1), (line, column + 1), inside),)


def keras_edits(facts: Facts) -> tuple[Edit, ...]:
    module = callbacks_module(facts)
    text = f"{module}.BroadcastGlobalVariablesCallback(0)"
    return add_callback(facts, text) if module else ()


def check_late(facts: Facts) -> Iterator[Finding]:
    """Find broadcasts of the state after the first step."""
    places = facts.places(*OF_STATE)
    if not places or facts.helpers.names & {*OF_STATE, *OTHERS}:
        return
    first = facts.training[0]
    # In TensorFlow 2 it follows the first step, before which the optimizer has no variables.
    loops = {loop for i in facts.training for loop in facts.events[i].loops(facts.script)}
    steps = {facts.script.function(facts.events[i].call) for i in facts.training}
    early = [
        i
        for i in places
        if i < first
        or loops & {*facts.events[i].loops(facts.script)}
        or _in_a_step(facts.script, facts.events[i].call, steps)
    ]
    if early or Framework.TF1 in facts.script.frameworks or facts.uses(*IN_TIME):
        return
    call = facts.events[places[0]].call
    line = facts.script.line(facts.events[first].call)
    yield facts.finding("QH603", call, f"training (line {line}) runs before it")


def _in_a_step(script: Script, call: cst.Call, steps: Collection[cst.FunctionDef | None]) -> bool:
    """Return whether a function with a training step makes this call conditionally.

    The condition is taken to select the first step.
    """
    function = script.function(call)
    return function is not None and function in steps and bool(script.branches(call))


def check_early(facts: Facts) -> Iterator[Finding]:
    """Find state that one rank loads after the broadcast, and broadcasts of no variables."""
    script = facts.script
    places = facts.places(*OF_STATE)
    if not places:
        return
    last = places[-1]
    for event in facts.events[last + 1 : facts.training[0]]:
        loads = facts.method(event.call) in LOADS and event.call.args
        if loads and guarded(script, event.branches(script)):
            line = script.line(facts.events[last].call)
            reason = f"rank 0 loads weights here, after they were broadcast in line {line}"
            yield facts.finding(
                "QH602",
                event.call,
                reason,
                severity=Severity.ERROR,
                remedy="Load the checkpoint before the broadcast.",
            )
    if Framework.TF2 not in script.frameworks or facts.mentions("build"):
        return
    for i in places:
        call = facts.events[i].call
        if i > facts.training[0] or not call.args:
            continue
        given = call.args[0].value
        given = given.func if isinstance(given, cst.Call) else given
        owner = given.value if isinstance(given, cst.Attribute) else None
        if owner is not None and script.value(owner) in constructors(facts):
            reason = f"{script.code(owner)} has no variables before its first step"
            yield facts.finding("QH602", call, reason)


def check_state(facts: Facts) -> Iterator[Finding]:
    """Find an optimizer state that one rank loads and that is not broadcast."""
    if not facts.uses("broadcast_parameters") or facts.uses("broadcast_optimizer_state"):
        return
    if facts.uses("TorchState", "broadcast_object"):
        return
    made = set(constructors(facts))
    for event in facts.events[: facts.training[0]]:
        call = event.call
        owner = receiver(call, "load_state_dict")
        if owner is not None:
            is_optimizer = made & facts.reach(owner).calls and "ptim" in facts.script.code(owner)
            if is_optimizer and guarded(facts.script, event.branches(facts.script)):
                reason = "one rank loads it, and the others keep theirs"
                yield facts.finding("QH604", call, reason)
