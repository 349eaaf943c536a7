"""The break-even bandwidth of compression, and a verdict on compression from measured speeds.

Coding with b bits saves 2 (p - 1) / p (4 - b / 8) bytes per element, rank and step on the wire and
costs c seconds per element. It pays on links slower than B* = 2 (p - 1) / p (4 - b / 8) / c. Both
are measured: the additional bytes that fp32 sent, and the additional seconds that the engine's
thread spent in coding. The model assumes that neither overlaps with computation; therefore the
verdict uses the measured speeds only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.quality import FEW_ENOUGH
from qsgd_hpc.scaling.analysis.results import BreakEven, CaseAnalysis
from qsgd_hpc.scaling.analysis.verdicts import (
    Judgement,
    Row,
    Verdict,
    compressed_rows,
    judge,
    largest_rows,
    plain_row,
)
from qsgd_hpc.scaling.define.plan import PLAIN_BITS

__all__ = ["break_even"]

_LOCAL = "local"


def break_even(case: CaseAnalysis, site: str = "") -> tuple[BreakEven, ...]:
    """Judge every compressed row of the largest size; empty if it has no fp32 row.

    Args:
        case: what was measured.
        site: the site where it was measured, for sentences; empty if unknown.
    """
    plain = plain_row(largest_rows(case))
    if plain is None:
        return ()
    return tuple(_judge(case, row, plain, site) for row in compressed_rows(case))


def _judge(case: CaseAnalysis, row: Row, plain: Row, site: str) -> BreakEven:
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
    if site in ("", _LOCAL):
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
