"""Verdicts: the faster of two rows, whether compressing pays, a case's main row; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsgd_hpc.scaling.analysis.quality import QualityVerdict, compare_quality, quality_of
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Estimate, Row
from qsgd_hpc.scaling.analysis.stats import enough, ratio_interval
from qsgd_hpc.scaling.define.plan import PLAIN_BITS

__all__ = [
    "Judgement",
    "Row",
    "Verdict",
    "compare_rows",
    "compare_speed",
    "compressed_rows",
    "judge",
    "largest_rows",
    "plain_row",
    "representative_judgement",
    "representative_row",
]

# The noise of single runs is unknown: they count as equally fast within this share of the fastest.
ONE_RUN_MARGIN = 0.05
# An interval within this distance of 1 shows that two speeds are equal; a wider one shows nothing.
SAME_MARGIN = 0.1


@dataclass(frozen=True)
class Verdict:
    """The speed of one row compared with another's.

    Attributes:
        word: "faster" or "slower"; "same" (as fast, and the noise is small enough to say so);
            "unclear" (the noise would hide a difference); "once" (either was measured once, so the
            noise is unknown).
        ratio: of the medians, with its 95 % interval where both were repeated.
        runs: about how many of each would show a difference as large as the observed one; 0 unless
            "unclear".
    """

    word: str
    ratio: Estimate
    runs: int = 0

    @property
    def off(self) -> float:
        """Largest distance of the interval from 1: the largest difference of two equal speeds."""
        low, high = self.ratio.low, self.ratio.high
        return 0.0 if low is None or high is None else max(1 - low, high - 1)


@dataclass(frozen=True)
class Judgement:
    """Whether compression pays; all sentences of a report are based on it.

    Attributes:
        word: "yes" (faster, and no loss of quality but one that chance explains), "no" (not faster,
            or a loss that chance does not explain), "undecided" (the runs do not decide it).
    """

    word: str
    speed: Verdict
    quality: QualityVerdict


def compare_speed(case: CaseAnalysis, row: Row, plain: Row) -> Verdict:
    """Compare two rows: no difference if the 95 % interval of their ratio contains 1."""
    if row is plain:
        return Verdict("same", Estimate(1.0))
    return compare_rows((case, row), (case, plain))


def compare_rows(ours: tuple[CaseAnalysis, Row], theirs: tuple[CaseAnalysis, Row]) -> Verdict:
    """Compare two rows, possibly of two studies; the verdict is on the first."""
    ratio = float(ours[1]["throughput"] / theirs[1]["throughput"])
    span = ratio_interval(_speeds(*ours), _speeds(*theirs))
    if span is None:
        return Verdict("once", Estimate(ratio))
    low, high = span
    if low > 1 or high < 1:
        word = "faster" if low > 1 else "slower"
    else:
        word = "same" if low > 1 - SAME_MARGIN and high < 1 + SAME_MARGIN else "unclear"
    runs = _runs_needed(_speeds(*ours), _speeds(*theirs)) if word == "unclear" else 0
    return Verdict(word, Estimate(ratio, low, high), runs)


def _runs_needed(ours: Any, theirs: Any) -> int:
    logs = np.log(ours), np.log(theirs)
    difference = float(logs[0].mean() - logs[1].mean())
    spread = sum(float(np.var(each, ddof=1)) for each in logs)
    return 1 + enough(spread, difference, comparisons=1) if difference else 0


def judge(case: CaseAnalysis, row: Row, plain: Row) -> Judgement:
    """Return whether a compressed row pays compared with fp32."""
    speed, quality = compare_speed(case, row, plain), compare_quality(case, row, plain)
    if quality.word == "worse" or speed.word in ("slower", "same"):
        word = "no"
    else:
        word = "yes" if speed.word == "faster" and quality.sound else "undecided"
    return Judgement(word, speed, quality)


def largest_rows(case: CaseAnalysis) -> list[Row]:
    """Return the rows of the largest size, fp32 first."""
    rows = case.rows()
    return [r for r in rows if r["ranks"] == rows[-1]["ranks"]]


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Return the fp32 row among those of one size."""
    return next((r for r in rows if r["bits"] == PLAIN_BITS), None)


def compressed_rows(case: CaseAnalysis) -> list[Row]:
    """Return the compressed rows of the largest size; none if it has no fp32 row."""
    largest = largest_rows(case)
    plain = plain_row(largest)
    if plain is None or plain["ranks"] == 1:
        return []
    return [row for row in largest if row["bits"] != PLAIN_BITS]


def representative_row(case: CaseAnalysis, rows: Sequence[Row] | None = None) -> Row | None:
    """Return the compressed row that the report's sentences describe; None if there is none.

    Among the rows with the best judgement (so that no sentence denies a gain that another one
    names), the fewest bits that are no slower than the fastest. If all lose quality, the row with
    the best quality.

    Args:
        rows: rows of one size; None: those of the largest size.
    """
    among = largest_rows(case) if rows is None else rows
    packed = sorted((r for r in among if r["bits"] != PLAIN_BITS), key=lambda r: r["bits"])
    if not packed:
        return None
    plain = plain_row(among)
    grades = [_grade(case, row, plain) for row in packed]
    best = [row for row, grade in zip(packed, grades, strict=True) if grade == max(grades)]
    if max(grades) == _ALL_LOSE:
        known = [row for row in best if row[case.quality] is not None] or best[-1:]
        sign = 1 if quality_of(case.quality).higher_is_better else -1
        return max(known, key=lambda r: sign * (r[case.quality] or 0.0))
    fastest = max(best, key=lambda r: r["throughput"])
    return next(r for r in best if _keeps_up(case, r, fastest))


def representative_judgement(
    case: CaseAnalysis, rows: Sequence[Row] | None = None
) -> tuple[Row, Judgement] | None:
    """Return the representative row and its judgement; None if it or fp32 is missing."""
    among = largest_rows(case) if rows is None else rows
    packed, plain = representative_row(case, among), plain_row(among)
    if packed is None or plain is None:
        return None
    return packed, judge(case, packed, plain)


_ALL_LOSE = (0, False)


def _grade(case: CaseAnalysis, row: Row, plain: Row | None) -> tuple[int, bool]:
    if plain is None:
        return 1, True
    judged = judge(case, row, plain)
    return ("no", "undecided", "yes").index(judged.word), judged.quality.sound


def _keeps_up(case: CaseAnalysis, row: Row, fastest: Row) -> bool:
    speed = compare_speed(case, row, fastest)
    if speed.word == "once":
        return speed.ratio.value > 1 - ONE_RUN_MARGIN
    return speed.word != "slower"


def _speeds(case: CaseAnalysis, row: Row) -> Any:
    return case.runs_of(row)["throughput"].to_numpy()
