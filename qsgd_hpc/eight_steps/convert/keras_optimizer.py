"""Steps 4 and 5 for Keras: the optimizer of model.compile."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rates import (
    KERAS_RATES,
    LINEAR,
    SCHEDULE,
    is_number,
    scale,
    scaled,
)
from qsgd_hpc.eight_steps.reading import Script, argument, find, is_literal

__all__ = ["distribute", "is_optimizer", "scale_optimizer"]

OPTIMIZER = re.compile(r"^(keras|tensorflow\.keras)\.optimizers\.(legacy\.)?[A-Z]\w*$")
MEAN = "Each step uses the mean of all ranks' gradients."


def is_optimizer(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression makes an optimizer of Keras."""
    return isinstance(node, cst.Call) and bool(OPTIMIZER.match(script.called(node)))


def scale_optimizer(plan: Plan, call: cst.Call) -> str:
    """Multiply the rate of an optimizer by the number of ranks.

    Returns:
        The new rate as Python code; "?" if it contains names, "" if it is no number.
    """
    script = plan.script
    rate = argument(call, "learning_rate", 0)
    if rate is None:
        default = KERAS_RATES.get(script.called(call).rpartition(".")[2])
        if default is None:
            plan.todo(call, "multiply the learning rate by hvd.size().")
            return ""
        plan.add_argument(call, f"learning_rate={default} * hvd.size()")
        plan.before(call, *plan.comment(4, LINEAR, call))
        return f"{default} * hvd.size()"
    if not is_number(script, rate):
        plan.todo(call, SCHEDULE)
        return ""
    scale(plan, rate)
    plan.before(call, *plan.comment(4, LINEAR, call))
    return scaled(script, rate) if is_literal(rate) else "?"


def distribute(plan: Plan, compile_: cst.Call) -> str:
    """Scale and wrap the optimizer of a call of compile; returns as `scale_optimizer` does."""
    script = plan.script
    given = argument(compile_, "optimizer", 0)
    if given is None:
        return _named(plan, compile_, None, "RMSprop")
    if isinstance(given, cst.SimpleString):
        names = {name.lower(): name for name in KERAS_RATES}
        return _named(plan, compile_, given, names.get(str(given.raw_value).lower(), ""))
    made = script.value(given)
    plan.before(compile_, *plan.comment(5, MEAN, compile_))
    plan.wrap(given, "hvd.DistributedOptimizer(", ")")
    if isinstance(made, cst.SimpleString):
        plan.todo(compile_, "give the optimizer a learning rate times hvd.size().")
        return ""
    if isinstance(made, cst.Call) and is_optimizer(script, made):
        return scale_optimizer(plan, made)
    plan.todo(compile_, "multiply the learning rate by hvd.size() where the optimizer is made.")
    return "?"


def _named(plan: Plan, compile_: cst.Call, given: cst.SimpleString | None, name: str) -> str:
    """Replace an optimizer's name by a wrapped optimizer of that name."""
    rate = KERAS_RATES.get(name)
    if rate is None:
        plan.todo(compile_, "give compile a hvd.DistributedOptimizer.")
        return ""
    rate = f"{rate} * hvd.size()"
    made = f"hvd.DistributedOptimizer(keras.optimizers.{name}({rate}))"
    plan.before(compile_, *plan.comment(4, LINEAR, compile_))
    plan.before(compile_, *plan.comment(5, MEAN, compile_))
    if given is not None:
        plan.replace(given, made)
    elif find(compile_, "optimizer") is None:
        plan.add_argument(compile_, f"optimizer={made}")
    return rate
