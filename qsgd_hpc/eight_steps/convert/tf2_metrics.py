"""Step 8 for metrics of Keras in a custom loop: sum their state over the ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import inside, name_of_module
from qsgd_hpc.eight_steps.convert.loops import TrainLoop
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted

__all__ = ["sum_metrics"]

METRIC = re.compile(r"^(keras|tensorflow\.keras)\.metrics\.[A-Z]\w*\(\)(\.update_state)?$")
TEXT = "The metrics cover this rank's shard; with the sums of all ranks they cover all data."


def sum_metrics(plan: Plan, loops: Sequence[TrainLoop]) -> None:
    """Sum the state of each loop's metrics over the ranks, after the loop."""
    script = plan.script
    tf = name_of_module(script, "tensorflow") or "tf"
    for loop in loops:
        names = _updated(script, loop)
        kept = [name for name in names if not _is_reset(script, name)]
        outer = loop.epochs is not None or script.function(loop.loop) is not None
        if kept and outer:
            plan.todo(loop.loop, f"average over the ranks: {', '.join(kept)}.")
            names = [name for name in names if name not in kept]
        if names:
            given = f"({', '.join(names)})" if len(names) > 1 else f"({names[0]},)"
            plan.after(
                loop.loop,
                *plan.comment(8, TEXT, loop.loop),
                f"for metric in {given}:",
                "    for value in metric.variables:",
                f"        value.assign(hvd.allreduce({tf}.convert_to_tensor(value), op=hvd.Sum))",
            )


def _updated(script: Script, loop: TrainLoop) -> list[str]:
    called = script.definition(loop.step)
    found = []
    for call in script.calls:
        here = inside(script, call, loop.loop) or (called and inside(script, call, called))
        if here and METRIC.match(script.called(call)):
            node = call.func
            if isinstance(node, cst.Attribute) and node.attr.value == "update_state":
                node = node.value
            found.append(dotted(node))
    return list(dict.fromkeys(name for name in found if name))


def _is_reset(script: Script, name: str) -> bool:
    resets = [
        c
        for c in script.calls
        if isinstance(c.func, cst.Attribute)
        and c.func.attr.value in ("reset_state", "reset_states")
    ]
    return any(
        dotted(c.func.value) == name for c in resets if isinstance(c.func, cst.Attribute)
    ) or any(
        isinstance(c.func, cst.Attribute)
        and (bound := script.binding(c.func.value)) is not None
        and bound.how == "for"
        and bound.value is not None
        and name in script.code(bound.value)
        for c in resets
    )
