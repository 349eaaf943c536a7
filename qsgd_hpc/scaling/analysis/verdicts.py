"""Verdicts: the faster of two rows, whether compressing pays, and the bandwidth up to which it can.

Coding with b bits saves 2 (p - 1) / p (4 - b / 8) bytes per element, rank and step on the wire and
costs c seconds per element. It pays on links slower than B* = 2 (p - 1) / p (4 - b / 8) / c. Both
are measured: the additional bytes that fp32 sent, and the additional seconds that the engine's
thread spent in coding. The model assumes that neither overlaps with computation; therefore the
verdict uses the measured speeds only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.quality import (
    FEW_ENOUGH,
    QualityVerdict,
    compare_quality,
    quality_of,
)
from qsgd_hpc.scaling.analysis.results import BreakEven, CaseAnalysis, Estimate, Row
from qsgd_hpc.scaling.analysis.stats import enough, ratio_interval
from qsgd_hpc.scaling.define.study import PLAIN_BITS

__all__ = [
    "Judgement",
    "Verdict",
    "break_even",
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
    speeds = [case.runs_of(row)["throughput"].to_numpy() for case, row in (ours, theirs)]
    span = ratio_interval(*speeds)
    if span is None:
        return Verdict("once", Estimate(ratio))
    low, high = span
    if low > 1 or high < 1:
        word = "faster" if low > 1 else "slower"
    else:
        word = "same" if low > 1 - SAME_MARGIN and high < 1 + SAME_MARGIN else "unclear"
    runs = _runs_needed(*speeds) if word == "unclear" else 0
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


def break_even(case: CaseAnalysis, site: str) -> tuple[BreakEven, ...]:
    """Judge every compressed row of the largest size; empty if it has no fp32 row.

    Args:
        case: what was measured.
        site: the site where it was measured, for sentences; empty if unknown.
    """
    plain = plain_row(largest_rows(case))
    if plain is None:
        return ()
    return tuple(_worth(case, row, plain, site) for row in compressed_rows(case))


def _worth(case: CaseAnalysis, row: Row, plain: Row, site: str) -> BreakEven:
    judged = judge(case, row, plain)
    bandwidth, measured = _break_even_bandwidth(row, plain), _measured_bandwidth(case, plain)
    parts = [
        *_evidence(row, judged),
        *_model(bandwidth, measured, judged.speed),
        *_room(plain, judged),
    ]
    head = _gains_nothing(case, row, judged.speed, site)
    reason = units.capitalised(f"{head}it {'; '.join(parts)}.")
    return BreakEven(row["bits"], bandwidth, measured, judged.word, reason)


def _gains_nothing(case: CaseAnalysis, row: Row, speed: Verdict, site: str) -> str:
    """Return the start of a sentence; empty if there may be a gain."""
    if speed.word not in ("same", "slower"):
        return ""
    where, name = _where(case, row, site), units.bits_name(row["bits"])
    if speed.word == "slower" or speed.ratio.high is None:
        return f"{where} this model gains nothing from {name}: "
    return f"{where} this model gains at most {units.bound(speed.ratio.high - 1)} from {name}: "


def _where(case: CaseAnalysis, row: Row, site: str) -> str:
    """Return where a row was measured: on its network if known, else on the machine."""
    if row["nodes"] > 1 and case.case.network:
        return case.case.network_place
    if site in ("", "local"):
        return "on one machine" if site else "here"
    return f"on {site}" if row["nodes"] > 1 else f"within one node of {site}"


def _break_even_bandwidth(row: Row, plain: Row) -> float | None:
    """Return B* in bytes per second and rank."""
    if None in (row["wire_bytes_per_step"], plain["wire_bytes_per_step"], row["coding_s"]):
        return None
    saved = (plain["wire_bytes_per_step"] - row["wire_bytes_per_step"]) / row["ranks"]
    # The sums count as coding only in compressed reductions, so B* is a little too low.
    extra_s = row["coding_s"] - (plain["coding_s"] or 0.0)
    if saved <= 0:
        return 0.0
    return float(saved / extra_s) if extra_s > 0 else math.inf


def _measured_bandwidth(case: CaseAnalysis, plain: Row) -> float | None:
    """Return the bytes that an fp32 rank sent per second in collectives; None if unknown."""
    runs = case.runs
    same = runs[(runs["ranks"] == plain["ranks"]) & (runs["bits"] == PLAIN_BITS)]
    rate = (same["wire_bytes_per_step"] / same["ranks"] / same["comm_s"]).median()
    return float(rate) if math.isfinite(rate) and rate > 0 else None


def _evidence(row: Row, judged: Judgement) -> Iterator[str]:
    ratio = judged.speed.ratio
    factor = units.times(ratio.value)
    if judged.speed.word == "once":
        yield (f"trained at {factor} the speed of fp32 (one run; three or more are needed to tell)")
    else:
        noise = {
            "same": ", which is the same within the noise",
            "unclear": f", a difference that the noise could explain{_remedy(judged.speed)}",
        }.get(judged.speed.word, "")
        span = units.interval(ratio.low, ratio.high)
        yield f"trains at {factor} the speed of fp32 (95%: {span}){noise}"
    if clause := judged.quality.clause:
        yield f"but it costs quality: {clause}" if judged.quality.word == "worse" else clause


def _remedy(speed: Verdict) -> str:
    few = 0 < speed.runs <= FEW_ENOUGH
    return f" (about {speed.runs} runs of each are needed to tell)" if few else ""


def _model(bandwidth: float | None, measured: float | None, speed: Verdict) -> Iterator[str]:
    """Yield the links on which coding can pay; nothing if the measured speed refutes the model."""
    seen = "" if measured is None else f" (here fp32 moved {units.bandwidth(measured)})"
    if bandwidth is None:
        return
    gained = speed.ratio.value > 1
    if bandwidth == 0:
        yield "it sends no fewer bytes"
    elif math.isinf(bandwidth):
        yield f"its coding costs nothing measurable{seen}"
    elif not (gained and measured is not None and measured > bandwidth):
        yield f"its coding can pay on links up to {units.bandwidth(bandwidth)} per rank{seen}"


def _room(plain: Row, judged: Judgement) -> Iterator[str]:
    """Yield the largest possible gain of any compression, unless a larger one was measured."""
    share = plain["exposed_share"]
    if judged.word == "yes" or not share:
        return
    most = math.inf if share >= 1 else 1 / (1 - share)
    if judged.speed.ratio.value <= most:
        end = (
            "" if math.isinf(most) else f", so the largest possible speed-up is {units.times(most)}"
        )
        yield f"fp32 waits {units.percent(share)} of a step for communication{end}"
