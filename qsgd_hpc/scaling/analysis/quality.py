"""How well a run trained: which number says so, which way is better, and what is close enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from qsgd_hpc.scaling.define.plan import PLAIN_BITS
from qsgd_hpc.scaling.store.attempts import Attempt

__all__ = [
    "ACCURACY",
    "NONE",
    "PERPLEXITY",
    "Quality",
    "cut_short",
    "default_target",
    "quality_of",
]


@dataclass(frozen=True)
class Quality:
    """A measure of quality.

    Attributes:
        column: "test_accuracy", "perplexity" or "" where a study records neither.
        higher_is_better: whether more of it is better.
        margin: a loss too small to matter, whether or not chance explains it: points of accuracy of
            0..1, or a share of the perplexity.
    """

    column: str
    higher_is_better: bool = True
    margin: float = 0.0

    def floor(self, value: float) -> float:
        """Return the worst value that is still as good as `value`, margin included."""
        return value - self.margin if self.higher_is_better else value * (1 + self.margin)

    def takes(self, target: float) -> bool:
        """Tell whether a number can be a target of this measure: a perplexity is above 1."""
        return bool(self.column) and (target <= 1) == self.higher_is_better

    def reaches(self, value: float, target: float) -> bool:
        """Tell whether a value is as good as a target; NaN never is."""
        return value >= target if self.higher_is_better else value <= target

    def gap(self, row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> float | None:
        """Return a row's value minus fp32's; None where one is missing."""
        if not self.column or row is None or plain is None:
            return None
        if row[self.column] is None or plain[self.column] is None:
            return None
        return float(row[self.column] - plain[self.column])


ACCURACY = Quality("test_accuracy", margin=0.003)
PERPLEXITY = Quality("perplexity", higher_is_better=False, margin=0.01)
NONE = Quality("")


def quality_of(frame: pd.DataFrame | str) -> Quality:
    """Return the measure that runs hold, or the one of a column's name."""
    for quality in (ACCURACY, PERPLEXITY):
        if isinstance(frame, str):
            if frame == quality.column:
                return quality
        elif frame[quality.column].notna().any():
            return quality
    return NONE


def cut_short(attempt: Attempt) -> bool:
    """Tell whether a run was ended by a number of steps within its first pass over the data.

    A network has learnt next to nothing then, and chance decides what a test says of it.
    """
    limited = "--steps" in attempt.provenance.get("command", ())
    return limited and sum(r.get("event") == "epoch" for r in attempt.records) <= 1


def default_target(runs: pd.DataFrame, quality: Quality) -> float | None:
    """Return what every fp32 run at the largest size reaches: the worst of them less the margin.

    None where nothing was measured at 32 bit, or without a quality.
    """
    if not quality.column:
        return None
    plain = runs[(runs["bits"] == PLAIN_BITS) & (runs["ranks"] == runs["ranks"].max())]
    values = plain[quality.column].dropna()
    if values.empty:
        return None
    return quality.floor(float(values.min() if quality.higher_is_better else values.max()))
