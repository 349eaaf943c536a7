"""Prints the table of docs/check.md: twelve faults, each in its own script, and the report.

python -m tests.check.table
"""

from __future__ import annotations

from collections.abc import Mapping

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.reading import parse
from tests.check.faults import CLEAN, FAULTS

__all__ = ["table"]

STYLES: Mapping[str, str] = {
    "jax_loop": "JAX, a loop",
    "keras_fit": "Keras, `fit`",
    "tensorflow_session": "TensorFlow 1, a session",
    "tensorflow_tape": "TensorFlow 2, a tape",
    "torch_loader": "PyTorch, a loader",
    "torch_trainer": "PyTorch, a class",
}
# What was done to the script, by the rule and the script.
PLANTED: Mapping[tuple[str, str], str] = {
    ("QH301", "keras_fit"): "the slice of the arrays by rank was removed",
    ("QH303", "torch_loader"): "`sampler.set_epoch(epoch)` was removed",
    ("QH305", "torch_trainer"): "`drop_last=True` was removed from a loader over shares by rank",
    ("QH401", "tensorflow_session"): "`* hvd.size()` was removed from the learning rate",
    ("QH501", "jax_loop"): "the optimizer is no longer wrapped",
    ("QH502", "tensorflow_tape"): "the tape is no longer wrapped",
    ("QH601", "tensorflow_session"): "the hook that broadcasts was removed",
    (
        "QH602",
        "tensorflow_tape",
    ): "`broadcast_variables(optimizer.variables, 0)` before the first step, when it has none",
    ("QH701", "torch_trainer"): "`if not is_chief(): return` was removed from `save()`",
    ("QH801", "keras_fit"): "`MetricAverageCallback` was removed",
    ("QH902", "torch_loader"): "`evaluate()`, which averages, moved under `if hvd.rank() == 0:`",
    ("QH903", "torch_trainer"): "the average was moved after `if self.rank != 0: return`",
}


def table() -> str:
    """Return the table in Markdown."""
    rows = ["| script | planted fault | report |", "|---|---|---|"]
    for (rule, script), planted in PLANTED.items():
        fault = next(f for f in FAULTS if f.rule == rule and f.script == script)
        (found,) = [f for f in check(parse(fault.text, CLEAN / script)) if f.rule.id == rule]
        said = (
            f"line {found.line}: {found.severity.value} {rule} {found.rule.title}: {found.reason}"
        )
        rows.append(f"| {STYLES[script]} | {planted} | {said.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
