"""Step 4 for PyTorch: a warm-up in addition to the schedulers of the script."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import find, walk
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rates import LINEAR, scale
from qsgd_hpc.eight_steps.convert.warmup import Steps
from qsgd_hpc.eight_steps.reading import Script

__all__ = ["is_scheduler", "warm_up"]

# Schedulers that set the rate to their own values and would undo a warm-up.
OWN_RATES = frozenset(
    {
        "ChainedScheduler",
        "ConstantLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "LambdaLR",
        "LinearLR",
        "MultiplicativeLR",
        "OneCycleLR",
        "SequentialLR",
    }
)


def is_scheduler(name: str) -> bool:
    """Return whether a name of torch.optim is that of a scheduler, not of an optimizer."""
    return ".lr_scheduler." in name or ".swa_utils." in name


def warm_up(
    plan: Plan, target: str, statement: cst.BaseStatement, steps: Steps, alone: bool
) -> None:
    """Warm up the rate of an optimizer, unless the script sets it.

    Args:
        plan: the plan to extend.
        target: the optimizer's name.
        statement: the warm-up is inserted after this and after the lines that wrap the optimizer.
        steps: steps of an epoch.
        alone: whether it is the only optimizer.
    """
    script = plan.script
    called = {
        script.called(c).rpartition(".")[2] for c in script.calls if is_scheduler(script.called(c))
    }
    own = sorted(called & OWN_RATES)
    by_hand = [
        n
        for n in script.nodes
        if isinstance(n, cst.SimpleString) and n.raw_value == "lr" and _is_set(script, n)
    ]
    resumed = any(
        script.called(c).endswith(".load_state_dict") and "optim" in script.code(c.func)
        for c in script.calls
    )
    if own == ["OneCycleLR"]:
        for call in script.calls:
            if script.called(call).endswith(".OneCycleLR"):
                rate = find(call, "max_lr", 1)
                if rate is not None:
                    scale(plan, rate.value)
                    plan.before(call, *plan.comment(4, f"{LINEAR} This warms up by itself.", call))
        return
    for key in by_hand:
        if _is_forgotten(script, key):
            plan.todo(
                key,
                "this sets the learning rate again: multiply it by hvd.size() too, with a warm-up.",
            )
            return
    if "CyclicLR" in own:
        plan.todo(statement, "CyclicLR sets its own rates: multiply them by hvd.size() too.")
        return
    if own or by_hand or resumed:
        why = own[0] if own else "the script" if by_hand else "the checkpoint"
        plan.todo(statement, f"{why} sets the learning rate: raise it to this over a warm-up.")
        return
    text = "Large steps at the beginning would diverge, so the rate rises over the first epoch."
    place, count = steps.at(plan, statement)
    if place is None:
        plan.todo(statement, "choose over how many steps the learning rate warms up.")
        place, count = statement, "100"
    torch = steps.torch
    name = "warm_up" if alone else f"{target.replace('.', '_')}_warm_up"
    plan.after(
        place,
        *plan.comment(4, text, place),
        f"{name} = {torch}.optim.lr_scheduler.LinearLR(",
        f"    {target}, start_factor=1 / hvd.size(), total_iters={count}",
        ")",
        f"{target}.register_step_post_hook(lambda *_: {name}.step())",
    )


def _is_set(script: Script, node: cst.SimpleString) -> bool:
    """Return whether a string is the key of `group["lr"] = ...`."""
    for parent in script.ancestors(node):
        if isinstance(parent, cst.AssignTarget | cst.AugAssign):
            target = parent.target
            return isinstance(target, cst.Subscript) and any(n is node for n in walk(target))
        if isinstance(parent, cst.BaseStatement):
            return False
    return False


def _is_forgotten(script: Script, key: cst.SimpleString) -> bool:
    """Return whether the value assigned to `group["lr"]` does not depend on the previous rate."""
    statement = next(n for n in script.ancestors(key) if isinstance(n, cst.Assign | cst.AugAssign))
    if isinstance(statement, cst.AugAssign):
        return False
    return re.search(r"""["'](initial_)?lr["']""", script.code(statement.value)) is None
