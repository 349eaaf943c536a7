"""Which of two rows is faster, and which compressed row speaks for a case; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.scaling.analysis import CaseAnalysis, Estimate
from qsgd_hpc.scaling.plan import PLAIN_BITS
from qsgd_hpc.scaling.quality import quality_of
from qsgd_hpc.scaling.stats import ratio_interval

__all__ = [
    "Row",
    "Verdict",
    "compare_rows",
    "compare_speed",
    "largest_rows",
    "plain_row",
    "spokesman",
]

Row = Mapping[str, Any]

# One run has no interval: nearer than this to fp32 it is called the same speed.
ONE_RUN_MARGIN = 0.05
# An interval this near to 1 shows that two speeds are the same; a wider one shows nothing.
SAME_MARGIN = 0.1


@dataclass(frozen=True)
class Verdict:
    """The speed of one row beside another's.

    Attributes:
        word: "faster" or "slower"; "same" (as fast, and the noise is small enough to say so);
            "unclear" (the noise would hide a difference).
        ratio: of the medians, with its 95 % interval where both were repeated.
    """

    word: str
    ratio: Estimate


def compare_speed(case: CaseAnalysis, row: Row, plain: Row) -> Verdict:
    """Compare two rows: no difference where the 95 % interval of their ratio holds 1."""
    if row is plain:
        return Verdict("same", Estimate(1.0))
    return compare_rows((case, row), (case, plain))


def compare_rows(ours: tuple[CaseAnalysis, Row], theirs: tuple[CaseAnalysis, Row]) -> Verdict:
    """Compare two rows, of two studies maybe: the verdict is on the first."""
    ratio = float(ours[1]["throughput"] / theirs[1]["throughput"])
    span = ratio_interval(_speeds(*ours), _speeds(*theirs))
    if span is None:
        word = "faster" if ratio > 1 else "slower"
        return Verdict("same" if abs(ratio - 1) < ONE_RUN_MARGIN else word, Estimate(ratio))
    low, high = span
    if low > 1 or high < 1:
        word = "faster" if low > 1 else "slower"
    else:
        word = "same" if low > 1 - SAME_MARGIN and high < 1 + SAME_MARGIN else "unclear"
    return Verdict(word, Estimate(ratio, low, high))


def largest_rows(case: CaseAnalysis) -> list[Row]:
    """Return the rows of the largest size, fp32 first."""
    rows = case.rows()
    return [r for r in rows if r["ranks"] == rows[-1]["ranks"]]


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Return the fp32 row among those of one size."""
    return next((r for r in rows if r["bits"] == PLAIN_BITS), None)


def spokesman(case: CaseAnalysis) -> Row | None:
    """Return the compressed row that the headline speaks of; None where there is none.

    At the largest size, the fewest bits that cost neither speed against the fastest compressed row
    nor more quality than the margin against fp32; if all cost quality, the best one.
    """
    largest, quality = largest_rows(case), quality_of(case.quality)
    packed = sorted((r for r in largest if r["bits"] != PLAIN_BITS), key=lambda r: r["bits"])
    sound = [r for r in packed if quality.as_good(r, plain_row(largest))]
    if packed and not sound:
        sign = 1 if quality.higher_is_better else -1
        return max(packed, key=lambda r: sign * r[quality.column])
    fastest = max(sound, key=lambda r: r["throughput"], default=None)
    if fastest is None:
        return None
    return next(r for r in sound if compare_speed(case, r, fastest).word != "slower")


def _speeds(case: CaseAnalysis, row: Row) -> Any:
    runs = case.runs
    same = runs[(runs["nodes"] == row["nodes"]) & (runs["ranks"] == row["ranks"])]
    return same[same["bits"] == row["bits"]]["throughput"].to_numpy()
