"""Step 6 for TensorFlow 2: after the first step, when all variables exist."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import inside, position_of
from qsgd_hpc.eight_steps.convert.loops import TrainLoop
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, argument, dotted

__all__ = ["broadcast"]

TEXT = "After the first step, when all variables exist, every rank takes rank 0's values."
NOW = "Every rank starts with rank 0's values."


def broadcast(
    plan: Plan,
    loops: Sequence[TrainLoop],
    gradients: Sequence[cst.Call],
    applies: Sequence[cst.Call],
) -> None:
    """Broadcast the variables of the model and of the optimizer in each training loop."""
    script = plan.script
    for loop in loops:
        given = [_variables(plan, loop, c) for c in gradients if _belongs(script, loop, c)]
        optimizers = [_optimizer(script, loop, c) for c in applies if _belongs(script, loop, c)]
        outer = loop.epochs or loop.loop
        if not given or None in given or None in optimizers:
            plan.todo(loop.loop, "broadcast all variables from rank 0 after the first step.")
            continue
        named = dict.fromkeys([g for g in given if g] + [f"{o}.variables" for o in optimizers])
        calls = [f"hvd.broadcast_variables({name}, root_rank=0)" for name in named]
        if not applies:
            plan.before(outer, *plan.comment(6, NOW, outer), *calls)
            continue
        body = loop.loop.body.body
        index = position_of(script, loop.step, body)
        plan.before(outer, "broadcast_done = False")
        plan.after(
            body[index],
            *plan.comment(6, TEXT, body[index]),
            "if not broadcast_done:",
            *(f"    {call}" for call in calls),
            "    broadcast_done = True",
        )


def _belongs(script: Script, loop: TrainLoop, call: cst.Call) -> bool:
    """Return whether a call is made in a loop, or in the function that the loop's step calls."""
    if inside(script, call, loop.loop):
        return True
    called = script.definition(loop.step)
    return called is not None and inside(script, call, called)


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


def _optimizer(script: Script, loop: TrainLoop, call: cst.Call) -> str | None:
    assert isinstance(call.func, cst.Attribute)
    return _translated(script, loop, call.func.value)


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
