"""Optimizers of PyTorch that train in turns, as in a GAN: each loss reaches only its own models.

Else a generator's loss also gives gradients to the discriminator. A serial script discards them;
several ranks would average them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, find, receiver

__all__ = ["Turn", "separate", "stepped", "turns"]

OWN = "This loss gives gradients only to the models whose optimizer steps next."


@dataclass(frozen=True, eq=False)
class Turn:
    """One backward pass.

    Attributes:
        backward: its call.
        steps: the optimizers that step next, by name.
    """

    backward: cst.Call
    steps: frozenset[str]


def stepped(call: cst.Call) -> cst.BaseExpression:
    """Return the optimizer of its own step, or of a loss scaler's; a function if it has no name."""
    if call.args:
        return call.args[0].value
    return call.func.value if isinstance(call.func, cst.Attribute) else call.func


def turns(
    script: Script, models: Mapping[str, Sequence[str]], made: Mapping[str, cst.Call]
) -> tuple[Turn, ...]:
    """Return the backward passes, if each can be limited to its own models without any effect.

    That is, if every optimizer's gradients are zeroed before its turn, in the same loop.

    Args:
        script: the script.
        models: the models of each optimizer, by its name.
        made: the call that makes it.
    Returns:
        Empty if that is not certain, or if all optimizers step together.
    """
    backward = [call for call in script.calls if script.called(call).endswith(".backward")]
    steps = [c for c in script.calls if _method(c) == "step" and dotted(stepped(c)) in models]
    events = sorted((*backward, *steps), key=script.start)
    places = {(script.function(each), script.loops(each)[:1]) for each in events}
    if len(places) != 1 or {dotted(stepped(each)) for each in steps} != {*models}:
        return ()
    if any(script.exclusive(one, other) for one in events for other in events):
        return ()
    owned = [(name, made[each]) for each, names in models.items() for name in names]
    if not all(models.values()) or not _is_disjoint([name for name, _ in owned]):
        return ()
    if not all(_is_visible(script, name, call, events[0]) for name, call in owned):
        return ()
    found = tuple(Turn(each, _next_steps(events, steps, each)) for each in backward)
    alike = all(turn.steps == {*models} for turn in found)
    if alike or not all(turn.steps and find(turn.backward, "inputs") is None for turn in found):
        return ()
    return found if all(_is_fresh(script, found, models, step) for step in steps) else ()


def separate(plan: Plan, found: Sequence[Turn], models: Mapping[str, Sequence[str]]) -> None:
    """Let each backward pass give gradients to its own models only."""
    for turn in found:
        names = list(
            dict.fromkeys(name for each in models if each in turn.steps for name in models[each])
        )
        origin = f"p in {names[0]}.parameters()"
        if len(names) > 1:
            origin = f"model in ({', '.join(names)}) for p in model.parameters()"
        plan.step(5, OWN, turn.backward, once=True)
        plan.add_argument(turn.backward, f"inputs=[p for {origin} if p.requires_grad]")


def _method(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _is_disjoint(names: Sequence[str]) -> bool:
    """Return whether no model is named twice, or part of another one."""
    return not any(
        one == other or one.startswith(f"{other}.")
        for place, one in enumerate(names)
        for other in (*names[:place], *names[place + 1 :])
    )


def _is_visible(script: Script, name: str, made: cst.Call, at: cst.Call) -> bool:
    """Return whether a model of an optimizer has the same name at another call."""
    root = name.partition(".")[0]
    function = script.function(at)
    if root == "self":
        return script.class_of(made) is script.class_of(at)
    if function is None or function is script.function(made):
        return function is script.function(made)
    return script.function(made) is None and (function, root) not in script.bindings


def _next_steps(
    events: Sequence[cst.Call], steps: Sequence[cst.Call], backward: cst.Call
) -> frozenset[str]:
    """Return the optimizers that step after a backward pass and before any further pass."""
    found: set[str] = set()
    for each in events[events.index(backward) + 1 :]:
        if each in steps:
            found.add(dotted(stepped(each)))
        elif found:
            break
    return frozenset(found)


def _is_fresh(
    script: Script, found: Sequence[Turn], models: Mapping[str, Sequence[str]], step: cst.Call
) -> bool:
    """Return whether an optimizer's gradients are zeroed between others' passes and its step."""
    name = dotted(stepped(step))
    others = [turn.backward for turn in found if name not in turn.steps]
    around = {branch.node: branch.taken for branch in script.branches(step)}
    whole = {name, *(models[name] if len(models[name]) == 1 else ())}
    return any(
        dotted(receiver(call, "zero_grad")) in whole
        and script.function(call) is script.function(step)
        and script.loops(call)[:1] == script.loops(step)[:1]
        and script.start(call) < script.start(step)
        and all(around.get(each.node) == each.taken for each in script.branches(call))
        and not any(script.start(call) < script.start(b) < script.start(step) for b in others)
        for call in script.calls
    )
