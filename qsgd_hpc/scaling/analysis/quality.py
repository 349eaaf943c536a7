"""Quality of a training: its measure, and whether compression reduced it by more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.stats import enough, proportion_bound, repeats_bound, sample_variance
from qsgd_hpc.scaling.define.study import PLAIN_BITS
from qsgd_hpc.scaling.store import Attempt

__all__ = [
    "ACCURACY",
    "FEW_ENOUGH",
    "NONE",
    "Quality",
    "QualityVerdict",
    "compare_quality",
    "cut_short",
    "default_target",
    "quality_of",
]

# Runs to ask for if the noise is unknown.
FEWEST = 3
# More repeats of a training, or a test set larger by more than this factor, are not realistic.
FEW_ENOUGH = 100
LARGER = 10

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class QualityVerdict:
    """The quality of one row compared with fp32.

    Attributes:
        word: "" (nothing to compare); "kept" (no worse than fp32 minus the margin); "noise" (worse,
            but by no more than chance explains); "worse" (by more than chance explains); "untold"
            (worse, and the runs do not show how much chance explains).
        change: the observed difference, such as 'test accuracy −0.34 points'; empty if a value
            is missing.
        clause: `change` with the effect of chance, and the number of runs or samples needed; empty
            if there is no loss.
        detail: a short form of the clause: "inside the noise", "one run" or "".
    """

    word: str
    change: str = ""
    clause: str = ""
    detail: str = ""

    @property
    def sound(self) -> bool:
        """Whether there is no loss beyond chance."""
        return self.word in ("", "kept", "noise")


def compare_quality(case: CaseAnalysis, row: Row, plain: Row | None) -> QualityVerdict:
    """Compare the quality of a row with fp32's.

    A loss counts only if it exceeds the margin and what chance explains, at 5 % for all comparisons
    of the study together: the spread of the repeats and, of accuracies, the size of the test set.
    If the repeats do not differ, the first is unknown, and no loss counts.
    """
    quality = quality_of(case.quality)
    if plain is None or row is plain or not quality.column:
        return QualityVerdict("")
    ours, theirs = (case.runs_of(r)[quality.column].to_numpy(float) for r in (row, plain))
    if np.isnan(ours).any() and not np.isnan(theirs).any():
        return QualityVerdict("untold", clause=_missing(quality, ours))
    gap = quality.gap(row, plain)
    if gap is None:
        return QualityVerdict("")
    noise = _Noise(case, quality, ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])
    word = _word(quality, noise, row, plain)
    change = f"{_name(quality)} {units.quality_gap(quality.column, gap)}"
    clause = "" if word == "kept" else change + noise.explanation(word, plain)
    return QualityVerdict(word, change, clause, noise.detail if gap else "")


def _word(quality: Quality, noise: _Noise, row: Row, plain: Row) -> str:
    if quality.reaches(row[quality.column], quality.floor(plain[quality.column])):
        return "kept"
    if noise.explains:
        return "noise"
    return "untold" if noise.of_repeats is None else "worse"


def _name(quality: Quality) -> str:
    return units.quality_name(quality.column).lower()


def _missing(quality: Quality, ours: Values) -> str:
    lost = int(np.isnan(ours).sum())
    which = "its run has" if len(ours) == 1 else f"{lost} of its {len(ours)} runs have"
    return f"{which} no {_name(quality)}, as after a divergence"


@dataclass(frozen=True)
class _Noise:
    """The part of the difference of two means that chance explains.

    Attributes:
        case: the case, for the size of its test set and the number of comparisons.
        quality: perplexities count by their logarithms, so that differences of them are relative.
        row, plain: qualities of the runs of the compressed row and of fp32.
    """

    case: CaseAnalysis
    quality: Quality
    row: Values
    plain: Values

    @cached_property
    def values(self) -> tuple[Values, Values]:
        """The qualities of the runs on the scale of the comparison."""
        if self.quality.higher_is_better:
            return self.row, self.plain
        return np.log(self.row), np.log(self.plain)

    @cached_property
    def loss(self) -> float:
        """Loss of the mean relative to fp32; negative if it is better."""
        ours, theirs = (float(values.mean()) for values in self.values)
        return theirs - ours if self.quality.higher_is_better else ours - theirs

    @cached_property
    def of_repeats(self) -> float | None:
        """The bound from the spread of the repeats; None if they have no spread."""
        return repeats_bound(*self.values, comparisons=self.case.comparisons)

    @cached_property
    def of_samples(self) -> float | None:
        """The bound from the size of the test set; None if unknown or quality is no accuracy."""
        count = self.case.test_samples
        if not self.quality.higher_is_better or not count:
            return None
        shares = (float(values.mean()) for values in self.values)
        return proportion_bound(*shares, samples=count, comparisons=self.case.comparisons)

    @property
    def bound(self) -> float | None:
        """The effect of chance; None if unknown."""
        known = [b for b in (self.of_repeats, self.of_samples) if b is not None]
        return math.hypot(*known) if known else None

    @property
    def explains(self) -> bool:
        """Whether a loss is no larger than the bound."""
        return self.bound is not None and self.loss <= self.bound

    @property
    def detail(self) -> str:
        """A short description of the difference."""
        if self.bound is not None and abs(self.loss) <= self.bound:
            return "inside the noise"
        return "one run" if len(self.row) == len(self.plain) == 1 else ""

    def explanation(self, word: str, plain: Row) -> str:
        """Return the text after the difference in a sentence."""
        if word == "worse":
            return f", where chance explains {self._span(self.bound, plain)}"
        tested = f"{self.case.test_samples or 0:,} test {units.sample(self.case.unit)}"
        if word == "noise":
            source = f" on {tested}" if self.of_repeats is None else ""
            span = self._span(self.bound, plain)
            return f", within the {span} that chance explains{source} ({self._remedy()})"
        beyond = ""
        if self.of_samples is not None:
            beyond = f", more than {tested} explain ({self._span(self.of_samples, plain)})"
        seen = f" {self._runs()}{beyond}"
        return f"{seen}; {FEWEST} or more of each, with different seeds, are needed to tell"

    def _runs(self) -> str:
        counts = {len(self.row), len(self.plain)}
        if counts == {1}:
            return "of one run each"
        if 1 in counts:
            return "with a single run of one of the two"
        return "of runs that gave the same value each time"

    def _remedy(self) -> str:
        """Return the number of runs or test samples needed for a loss of the observed size."""
        several, hidden = self.case.comparisons, self.of_samples or 0.0
        if self.loss <= 0:
            return "more runs of each are needed to tell"
        if self.loss <= hidden:
            shares = (float(values.mean()) for values in self.values)
            each = sum(sample_variance(share, self.case.test_samples or 1) for share in shares)
            count = enough(each, self.loss, comparisons=several)
            if count > LARGER * (self.case.test_samples or 1):
                return "the test set is too small to tell"
            return f"about {_rounded(count)} test {units.sample(self.case.unit)} are needed to tell"
        spread = sum(float(np.var(values, ddof=1)) for values in self.values)
        left = math.sqrt(self.loss**2 - hidden**2)
        count = max(FEWEST, 1 + enough(spread, left, comparisons=several))
        if count > FEW_ENOUGH:
            return f"{FEW_ENOUGH} runs of each are not enough to tell"
        return f"about {_rounded(count)} runs of each are needed to tell"

    def _span(self, bound: float | None, plain: Row) -> str:
        assert bound is not None
        if not self.quality.higher_is_better:
            bound = plain[self.quality.column] * math.expm1(bound)
        return units.quality_gap(self.quality.column, bound).replace("+", "±")


def _rounded(count: int) -> str:
    """Return a count to two digits, for estimates: '14,000'."""
    return f"{int(float(f'{count:.2g}')):,}"


@dataclass(frozen=True)
class Quality:
    """A measure of quality.

    Attributes:
        column: "test_accuracy", "perplexity" or "" where a study records neither.
        higher_is_better: whether higher values are better.
        margin: largest loss that does not matter: a difference of accuracies of 0..1, or a share of
            the perplexity.
    """

    column: str
    higher_is_better: bool = True
    margin: float = 0.0

    def floor(self, value: float) -> float:
        """Return the worst value that is still as good as `value`, margin included."""
        return value - self.margin if self.higher_is_better else value * (1 + self.margin)

    def takes(self, target: float) -> bool:
        """Return whether a number can be a target of this measure: a perplexity is above 1."""
        return bool(self.column) and (target <= 1) == self.higher_is_better

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target; NaN never is."""
        return value >= target if self.higher_is_better else value <= target

    def gap(self, row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> float | None:
        """Return a row's value minus fp32's; None if one is missing."""
        if not self.column or row is None or plain is None:
            return None
        if row[self.column] is None or plain[self.column] is None:
            return None
        return float(row[self.column] - plain[self.column])


ACCURACY = Quality("test_accuracy", margin=0.003)
PERPLEXITY = Quality("perplexity", higher_is_better=False, margin=0.01)
NONE = Quality("")


def quality_of(frame: pd.DataFrame | str) -> Quality:
    """Return the measure that the runs recorded, or the measure with a column's name."""
    for quality in (ACCURACY, PERPLEXITY):
        if isinstance(frame, str):
            if frame == quality.column:
                return quality
        elif frame[quality.column].notna().any():
            return quality
    return NONE


def cut_short(attempt: Attempt) -> bool:
    """Return whether a run was ended by a number of steps within its first pass over the data.

    The network has then learnt almost nothing, and its test result depends on chance.
    """
    # The study's own --steps comes last; one of the user's, which comes first, may end an epoch or
    # many.
    words = tuple(attempt.provenance.get("command", ()))
    limited = words[-2:-1] == ("--steps",)
    return limited and sum(r.get("event") == "epoch" for r in attempt.records) <= 1


def default_target(runs: pd.DataFrame, quality: Quality) -> float | None:
    """Return the worst quality of the fp32 runs at the largest size, minus the margin.

    None if nothing was measured at 32 bit, or without a quality.
    """
    if not quality.column:
        return None
    plain = runs[(runs["bits"] == PLAIN_BITS) & (runs["ranks"] == runs["ranks"].max())]
    values = plain[quality.column].dropna()
    if values.empty:
        return None
    return quality.floor(float(values.min() if quality.higher_is_better else values.max()))
