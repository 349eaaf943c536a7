"""Step 4: learning rates in the calls that make optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import argument_node, walk
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script

__all__ = ["KERAS_RATES", "TORCH_RATES", "is_number", "scale", "scaled", "torch_rates"]

LINEAR = "A batch hvd.size() times larger needs steps hvd.size() times larger."

# Default rates of the optimizers.
TORCH_RATES: Mapping[str, str] = {
    "ASGD": "1e-2", "Adadelta": "1.0", "Adafactor": "1e-2", "Adagrad": "1e-2", "Adam": "1e-3",
    "AdamW": "1e-3", "Adamax": "2e-3", "LBFGS": "1", "Muon": "1e-3", "NAdam": "2e-3",
    "RAdam": "1e-3", "RMSprop": "1e-2", "Rprop": "1e-2", "SGD": "1e-3", "SparseAdam": "1e-3",
}  # fmt: skip
KERAS_RATES: Mapping[str, str] = {
    "Adadelta": "0.001", "Adafactor": "0.001", "Adagrad": "0.001", "Adam": "0.001",
    "AdamW": "0.001", "Adamax": "0.001", "Ftrl": "0.001", "Lion": "0.001", "Nadam": "0.001",
    "RMSprop": "0.001", "SGD": "0.01",
}  # fmt: skip
SIMPLE = cst.Name | cst.Attribute | cst.Integer | cst.Float | cst.Call | cst.Subscript


def scaled(script: Script, rate: cst.BaseExpression) -> str:
    """Return the rate times the number of ranks, as Python code."""
    text = script.code(rate)
    return f"{text if isinstance(rate, SIMPLE) else f'({text})'} * hvd.size()"


def scale(plan: Plan, rate: cst.BaseExpression) -> None:
    """Multiply a rate by the number of ranks, in place."""
    plan.replace(rate, scaled(plan.script, rate))


def torch_rates(call: cst.Call) -> Iterator[cst.BaseExpression]:
    """Yield the learning rates in a call of an optimizer, including those of parameter groups."""
    rate = argument_node(call, "lr", 1)
    if rate is not None:
        yield rate
    groups = argument_node(call, "params", 0)
    for node in walk(groups) if groups is not None else ():
        if (
            isinstance(node, cst.DictElement)
            and isinstance(node.key, cst.SimpleString)
            and node.key.raw_value == "lr"
        ):
            yield node.value


def is_number(script: Script, rate: cst.BaseExpression) -> bool:
    """Return whether a rate is a number, not a schedule, as far as the text shows."""
    made = script.value(rate)
    return not (isinstance(made, cst.Call) and "chedule" in script.called(made)) and not (
        isinstance(made, cst.Call)
        and script.called(made).rpartition(".")[2].endswith(("Decay", "Restarts", "decay"))
    )
