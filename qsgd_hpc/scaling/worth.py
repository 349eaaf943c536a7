"""Is compression worth it for this user? The break-even bandwidth, and what was measured.

Fewer bits save 2 (p - 1) / p (w - b / 8) bytes per element, rank and step on the wire (w = 4) and
cost c seconds per element of coding. They pay on links slower than
B* = 2 (p - 1) / p (w - b / 8) / c. Both are taken as measured: the bytes that fp32 sent more, and
the seconds that the engine's thread spent longer in coding. The model assumes that neither hides
behind computing; the verdict therefore rests on the measured speeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.analysis import BreakEven, CaseAnalysis
from qsgd_hpc.scaling.plan import PLAIN_BITS
from qsgd_hpc.scaling.quality import quality_of
from qsgd_hpc.scaling.verdicts import Row, Verdict, compare_speed, largest_rows, plain_row

__all__ = ["break_even"]

_VERDICTS = {"faster": "yes", "slower": "no", "same": "no", "unclear": "undecided"}
_LOCAL = "local"


def break_even(case: CaseAnalysis, site: str = "") -> tuple[BreakEven, ...]:
    """Judge every row of fewer bits at the largest size; empty without fp32 beside them.

    Args:
        case: what was measured.
        site: where, for sentences; empty where that is not known.
    """
    largest = largest_rows(case)
    plain = plain_row(largest)
    if plain is None or plain["ranks"] == 1:
        return ()
    packed = [row for row in largest if row["bits"] != PLAIN_BITS]
    return tuple(_judge(case, row, plain, site) for row in packed)


def _judge(case: CaseAnalysis, row: Row, plain: Row, site: str) -> BreakEven:
    speed = compare_speed(case, row, plain)
    sound = quality_of(case.quality).as_good(row, plain)
    verdict = _VERDICTS[speed.word] if sound else "no"
    if sound and speed.ratio.low is None:
        verdict = "undecided"  # of one run each nobody knows the noise
    bandwidth, measured = _break_even_bandwidth(row, plain), _seen(case, plain)
    parts = [*_evidence(case, row, plain, speed, sound=sound), *_model(bandwidth, measured)]
    if verdict != "yes" and plain["exposed_share"]:
        parts.append(_room(plain))
    head = _gains_nothing(case, row, speed, site)
    reason = words.capitalised(f"{head}it {'; '.join(parts)}.")
    return BreakEven(row["bits"], bandwidth, measured, verdict, reason)


def _gains_nothing(case: CaseAnalysis, row: Row, speed: Verdict, site: str) -> str:
    """Return the start of a sentence, or nothing where there is a gain or the noise hides it."""
    if speed.ratio.low is None or speed.word not in ("same", "slower"):
        return ""
    where = _where(case, row, site)
    return f"{where} this model gains nothing from {words.bits_name(row['bits'])}: "


def _where(case: CaseAnalysis, row: Row, site: str) -> str:
    """Return where a row was measured: its network where that is known, else the machine."""
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
    # Adding counts as coding at fewer bits alone, although fp32 adds too: B* is a little too low.
    extra_s = row["coding_s"] - (plain["coding_s"] or 0.0)
    if saved <= 0:
        return 0.0
    return float(saved / extra_s) if extra_s > 0 else math.inf


def _seen(case: CaseAnalysis, plain: Row) -> float | None:
    """Return bytes that a rank of fp32 sent per second of its collectives; None if unknown."""
    runs = case.runs
    same = runs[(runs["ranks"] == plain["ranks"]) & (runs["bits"] == PLAIN_BITS)]
    rate = (same["wire_bytes_per_step"] / same["ranks"] / same["comm_s"]).median()
    return float(rate) if math.isfinite(rate) and rate > 0 else None


def _evidence(
    case: CaseAnalysis, row: Row, plain: Row, speed: Verdict, *, sound: bool
) -> Iterator[str]:
    ratio = speed.ratio
    noise = {
        "same": ", which is the same within the noise",
        "unclear": ", a difference that the noise could explain",
    }.get(speed.word, "")
    span = words.interval(ratio.low, ratio.high)
    trust = f" (95%: {span})" if span else " (one run, three would tell)"
    yield f"trains at {words.times(ratio.value)} the speed of fp32{trust}{noise}"
    gap = quality_of(case.quality).gap(row, plain)
    if not sound and gap is not None:
        name = words.quality_name(case.quality).lower()
        yield f"but it costs quality ({name} {words.quality_gap(case.quality, gap)})"


def _model(bandwidth: float | None, measured: float | None) -> Iterator[str]:
    seen = "" if measured is None else f", and here fp32 moved {words.bandwidth(measured)}"
    if bandwidth is None:
        return
    if bandwidth == 0:
        yield "it sends no fewer bytes"
    elif math.isinf(bandwidth):
        yield f"its coding costs nothing measurable{seen}"
    else:
        yield f"its coding pays on links below {words.bandwidth(bandwidth)} per rank{seen}"


def _room(plain: Row) -> str:
    share = plain["exposed_share"]
    most = f", so no more than {words.times(1 / (1 - share))} can be gained" if share < 1 else ""
    return f"fp32 waits {words.percent(share)} of a step for communication{most}"
