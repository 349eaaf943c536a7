"""Findings of a case and of a study as text; no gain is claimed that the noise could explain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.fits import peak_ranks
from qsgd_hpc.scaling.analysis.quality import compare_quality, quality_of
from qsgd_hpc.scaling.analysis.results import Analysis, CaseAnalysis, Estimate, Fit, LinkFit, Row
from qsgd_hpc.scaling.analysis.verdicts import (
    Judgement,
    Verdict,
    compare_speed,
    judge,
    largest_rows,
    plain_row,
    representative_judgement,
    representative_row,
)
from qsgd_hpc.scaling.define.study import PLAIN_BITS, Case, Study
from qsgd_hpc.scaling.report.cautions import Machine, cautions

__all__ = [
    "CaseFindings",
    "Findings",
    "Tile",
    "case_findings",
    "coded_sentences",
    "findings",
    "law_sentence",
    "link_sentence",
    "reference_name",
    "speed_words",
]

# docs/compression.md, "What a code loses".
UNNOTICED = 0.1

_LAWS = {
    "amdahl": "Amdahl’s law",
    "gustafson": "Gustafson’s law",
    "usl": "Universal scalability law",
}
_PARAMETERS = {
    "serial": ("serial share", units.percent),
    "contention": ("contention", units.percent),
    "coherency": ("coherency", lambda value: f"{value:.2g}"),
}


def coded_sentences(case: CaseAnalysis) -> tuple[str, ...]:
    """Return the coding error, and how many gradients were sent as float32 although bits were set.

    Empty if nothing was compressed, or nothing was recorded.
    """
    return (*_lost(case), *_uncoded(case.runs))


def _lost(case: CaseAnalysis) -> Iterator[str]:
    known = [row for row in case.rows() if row["nmse"] is not None]
    if not known:
        return
    largest = [row for row in known if row["ranks"] == known[-1]["ranks"]]
    lost = ", ".join(
        f"{units.share(row['nmse'])} with {units.bits_name(row['bits'])} "
        f"(NMSE {units.nmse(row['nmse'])})"
        for row in largest
    )
    noticed = any(row["nmse"] >= UNNOTICED for row in largest)
    more = "; near and above 1 it needs error feedback" if noticed else ""
    more += _exceptions(case, largest)
    yield (
        f"Coding error, relative to the squared magnitude of the gradients: {lost}. "
        f"As a rule, an NMSE below {UNNOTICED} does not affect training{more}."
    )


def _exceptions(case: CaseAnalysis, rows: Sequence[Row]) -> str:
    """Return a clause with the rows that lost quality although their NMSE is below the limit."""
    plain = plain_row(largest_rows(case))
    lost = [
        units.bits_name(row["bits"])
        for row in rows
        if row["nmse"] < UNNOTICED and compare_quality(case, row, plain).word == "worse"
    ]
    return f"; here {' and '.join(lost)} did cost quality" if lost else ""


def _uncoded(runs: pd.DataFrame) -> Iterator[str]:
    several = runs[(runs["ranks"] > 1) & (runs["bits"] != PLAIN_BITS)]
    for bits in sorted(set(several["bits"]), reverse=True):
        known = several[(several["bits"] == bits) & (several["asked_tensors"] > 0)]
        if not known["plain_tensors"].any():
            continue
        tensors = units.span(known["plain_tensors"], "{:.0f}".format)
        share = units.span(known["plain_elements"] / known["asked_elements"], units.percent)
        asked_tensors = int(known["asked_tensors"].max())
        which = f"{tensors} of {asked_tensors} tensors ({share} of the elements)"
        asked = f"although {units.bits_name(bits)} was set"
        if (known["declined_tensors"] == known["plain_tensors"]).all():
            yield f"The planner sent {which} as float32 {asked}."
        else:
            yield f"{which} were sent as float32 {asked}."


@dataclass(frozen=True)
class Tile:
    """One number of the stats strip: a label, the value, its unit, and what it refers to."""

    label: str
    value: str
    unit: str
    detail: str


@dataclass(frozen=True)
class CaseFindings:
    """The findings of one case as text.

    Attributes:
        headline: one sentence without full stop.
        lead: the sentences under it.
        tiles: one to six numbers of the largest size.
        advice: whether to compress, with the numbers; empty if nothing was compressed.
        coded: the coding error and the gradients sent as float32; empty if nothing was compressed.
    """

    case: Case
    headline: str
    lead: str
    tiles: tuple[Tile, ...]
    advice: str
    coded: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Shown:
    """The rows that the findings describe: fp32 and a compressed row of the largest size."""

    analysis: CaseAnalysis
    largest: list[Row]
    plain: Row | None
    packed: Row | None

    @property
    def row(self) -> Row:
        return self.packed if self.packed is not None else self.largest[0]


def case_findings(analysis: CaseAnalysis, *, mode: str) -> CaseFindings:
    """Return the findings of a case at its largest size."""
    largest = largest_rows(analysis)
    shown = _Shown(analysis, largest, plain_row(largest), representative_row(analysis))
    return CaseFindings(
        case=analysis.case,
        headline=_headline(shown),
        lead=". ".join(_lead(shown, mode)) + ".",
        tiles=tuple(_tiles(shown)),
        advice=_advice(shown),
        coded=coded_sentences(analysis),
    )


def reference_name(analysis: CaseAnalysis) -> str:
    """Name the row whose speed-up is 1, such as '1 rank' or '2 ranks at 8 bit'."""
    ranks, bits = analysis.reference
    name = units.count(ranks, "rank")
    return name if bits == PLAIN_BITS else f"{name} at {bits} bit"


def speed_words(speed: Verdict) -> str:
    """Return the speed of a compressed training, such as 'trains 1.30× as fast as fp32'."""
    factor = units.times(speed.ratio.value)
    return {
        "faster": f"trains {factor} as fast as fp32",
        "slower": f"trains at {factor} the speed of fp32",
        "same": f"trains as fast as fp32, within {units.bound(speed.off)}",
        "unclear": "shows no speed difference to fp32 above the noise",
        "once": f"trained at {factor} the speed of fp32",
    }[speed.word]


def law_sentence(fit: Fit) -> str:
    """Return a fitted law's parameters with their intervals, its residuals and its caution."""
    named = []
    for name, estimate in fit.parameters.items():
        title, form = _PARAMETERS[name]
        named.append(f"{title} {_estimate(estimate, form)}")
    if (peak := peak_ranks(fit)) is not None:
        ranks = _estimate(peak, lambda value: f"{value:.0f}")
        named.append(f"most throughput at {ranks} rank{'' if ranks == '1' else 's'}")
    text = (
        f"{_LAWS[fit.law]}, {units.bits_name(fit.bits)}: {', '.join(named)}; "
        f"residuals {units.percent(fit.error)} of the speed-up over "
        f"{units.count(fit.sizes, 'size')}."
    )
    return f"{text} {fit.caution}".rstrip()


def link_sentence(link: LinkFit) -> str:
    """Return Hockney's latency and bandwidth as text."""
    text = (
        f"Fitted to the communication: {_estimate(link.latency_s, units.seconds)} per message and "
        f"{_estimate(link.bandwidth, units.bandwidth)} per rank; residuals "
        f"{units.percent(link.error)} over {link.points} points."
    )
    return f"{text} {link.caution}".rstrip()


def _estimate(estimate: Estimate, form: Callable[[float], str]) -> str:
    value = "unbounded" if math.isinf(estimate.value) else form(estimate.value)
    if estimate.low is None:
        return value
    if estimate.high is None:
        return f"{value} ({form(estimate.low)} or more)"
    return f"{value} ({form(estimate.low)}..{form(estimate.high)})"


def once_note(rows: Sequence[Row]) -> str:
    """Return ' (one run)' for the end of a sentence if a row was measured once."""
    return " (one run)" if any(row["repeats"] == 1 for row in rows) else ""


def _headline(shown: _Shown) -> str:
    where = units.nodes_name(shown.largest[0]["nodes"])
    if shown.plain is None or shown.packed is None:
        return _scaling_headline(shown, where) + once_note(shown.largest)
    once = once_note([shown.plain, shown.packed])
    judged = judge(shown.analysis, shown.packed, shown.plain)
    result, change = speed_words(judged.speed), judged.quality.change
    if judged.quality.word == "worse":
        result += f", but costs quality: {change}"
    elif judged.quality.word == "untold":
        result += f", with {change}" if change else f", but {judged.quality.clause}"
    result += _decline(shown.analysis, shown.packed)
    name = f"{shown.packed['bits']}-bit QSGD"
    ratio = shown.packed["compression_ratio"]
    if ratio is None:
        return f"On {where}, {name} {result}{once}"
    gained = judged.speed.word in ("faster", "same") or (
        judged.speed.word == "once" and judged.speed.ratio.value >= 1
    )
    sends = "sent" if judged.speed.word == "once" else "sends"
    joint = "and" if gained == units.sends_fewer(ratio) else "but"
    return f"On {where}, {name} {sends} {units.fewer(ratio)} bytes {joint} {result}{once}"


def declines(analysis: CaseAnalysis, row: Row) -> bool:
    """Return whether a row is slower than the reference, which has fewer ranks."""
    high = row["speedup"] if row["speedup_hi"] is None else row["speedup_hi"]
    return bool(row["ranks"] > analysis.reference[0] and high < 1)


def _decline(analysis: CaseAnalysis, row: Row) -> str:
    if not declines(analysis, row):
        return ""
    verb = "trained" if row["repeats"] == 1 else "trains"
    return f"; it {verb} at {units.times(row['speedup'])} the speed of {reference_name(analysis)}"


def _scaling_headline(shown: _Shown, where: str) -> str:
    best = max(shown.largest, key=lambda r: r["throughput"])
    verb = "trains" if best["nodes"] == 1 else "train"
    if best["ranks"] == shown.analysis.reference[0]:
        speed = units.rate(best["throughput"], shown.analysis.unit)
        name = units.bits_name(best["bits"])
        with_bits = "" if best["ranks"] == 1 else f" with {name}"
        return f"{where.capitalize()} {verb} at {speed}{with_bits}"
    reference = reference_name(shown.analysis)
    start = f"With {units.bits_name(best['bits'])}, {where}"
    low, high = best["speedup_lo"], best["speedup_hi"]
    if low is not None and high is not None and low <= 1 <= high:
        show = "shows" if best["nodes"] == 1 else "show"
        return f"{start} {show} no speed difference to {reference} above the noise"
    return (
        f"{start} {verb} {units.times(best['speedup'])} as "
        f"fast as {reference}, {units.percent(best['efficiency'])} of ideal"
    )


def _lead(shown: _Shown, mode: str) -> Iterator[str]:
    analysis, rows = shown.analysis, [r for r in (shown.plain, shown.packed) if r is not None]
    first, last = analysis.reference[0], shown.largest[0]["ranks"]
    if first != last:
        growth = ", ".join(f"{units.bits_name(r['bits'])} {_speedup(r)}" for r in rows)
        yield f"Speed-up from {first} to {last} ranks: {growth}"
    if len(rows) == 2:
        ratio = compare_speed(analysis, rows[1], rows[0]).ratio
        if span := units.interval(ratio.low, ratio.high):
            name = units.bits_name(rows[1]["bits"])
            yield f"Speed of {name} over fp32: {span} with 95% confidence"
    if analysis.quality and all(r[analysis.quality] is not None for r in rows):
        reached = ", ".join(
            f"{units.quality(analysis.quality, r[analysis.quality])} with "
            f"{units.bits_name(r['bits'])}"
            for r in rows
        )
        better = "" if quality_of(analysis.quality).higher_is_better else " (lower is better)"
        yield f"{units.quality_name(analysis.quality)}{better}: {reached}"
    batch, noun = analysis.case.batch_size, units.sample(analysis.unit)
    yield (
        f"The global batch stays at {batch} {noun}"
        if mode == "strong"
        else f"Each rank keeps its batch of {batch} {noun}"
    )


def _speedup(row: Row) -> str:
    return f"{units.times(row['speedup'])} ({units.percent(row['efficiency'])} of ideal)"


def _tiles(shown: _Shown) -> Iterator[Tile]:
    analysis, row = shown.analysis, shown.row
    name = units.bits_name(row["bits"])
    where = f"{units.nodes_name(row['nodes'])}, {name}"
    yield Tile("Throughput", units.speed(row["throughput"]), f"{analysis.unit}/s", where)
    if row["ranks"] > analysis.reference[0]:
        yield Tile(
            "Efficiency",
            units.percent(row["efficiency"]),
            "of ideal",
            f"{name}, {units.times(row['speedup'])} over {reference_name(analysis)}",
        )
    if row["exposed_share"] is not None:
        share = units.percent(row["exposed_share"])
        yield Tile("Exposed communication", share, "of a step", f"{name}{_against(shown)}")
    if row["wire_bytes_per_step"]:
        value, unit = units.bytes_short(row["wire_bytes_per_step"]).split()
        ratio = row["compression_ratio"]
        compared = row is shown.packed and ratio is not None
        fewer = f", {units.fewer(ratio)} than fp32" if compared else ""
        yield Tile("On the wire", value, f"{unit} per step", f"{name}{fewer}")
    if analysis.quality and row[analysis.quality] is not None:
        change = _difference(shown)
        value = units.quality(analysis.quality, row[analysis.quality])
        yield Tile(units.quality_name(analysis.quality), value, "", f"{name}{change}")
    if row["time_to_target_s"] is not None:
        target = units.quality(analysis.quality, analysis.target)
        value, unit = units.seconds(row["time_to_target_s"]), f"to {target}"
        yield Tile("Time to target", value, unit, where)


def _difference(shown: _Shown) -> str:
    gap = quality_of(shown.analysis.quality).gap(shown.packed, shown.plain)
    if gap is None or shown.packed is None:
        return ""
    noise = compare_quality(shown.analysis, shown.packed, shown.plain).detail
    change = units.quality_gap(shown.analysis.quality, gap)
    return f", {change} from fp32{f', {noise}' if noise else ''}"


def _against(shown: _Shown) -> str:
    if shown.plain is None or shown.packed is None or shown.plain["exposed_share"] is None:
        return ""
    return f"; fp32 {units.percent(shown.plain['exposed_share'])}"


def _advice(shown: _Shown) -> str:
    bits = None if shown.packed is None else shown.packed["bits"]
    judged = next((b for b in shown.analysis.break_even if b.bits == bits), None)
    if judged is None:
        return ""
    return f"Compress to {judged.bits} bit? {judged.verdict.capitalize()}. {judged.reason}"


_NOISE = {"once": ", one run", "same": ", inside the noise", "unclear": ", inside the noise"}


@dataclass(frozen=True)
class Findings:
    """The findings of a study as text.

    Attributes:
        headline: one sentence without full stop; for a single case, the headline of the case.
        lead: the sentences under it; for several cases, a count of cases and measurements.
        tiles: the strip of numbers; for several cases, the extremes and their cases.
        cautions: 'Head: Sentences.', including those of the analysis; origins.py adds others.
        cases: the findings of each case, in the order of the analysis.
    """

    headline: str
    lead: str
    tiles: tuple[Tile, ...]
    cautions: tuple[str, ...]
    cases: tuple[CaseFindings, ...]


def findings(study: Study, analysis: Analysis, *, machine: Machine | None) -> Findings:
    """Return the findings at the largest size.

    Args:
        study: the definition.
        analysis: has at least one case.
        machine: the machine that all nodes were parts of; None if there were several.
    """
    cases = tuple(case_findings(case, mode=study.mode) for case in analysis.cases)
    limits = cautions(analysis, mode=study.mode, machine=machine)
    if len(cases) == 1:
        return Findings(cases[0].headline, cases[0].lead, cases[0].tiles, limits, cases)
    gains = [
        _Gain(case, *found)
        for case in analysis.cases
        if (found := representative_judgement(case)) is not None
    ]
    return Findings(
        headline=_study_headline(analysis, gains) + _declines(gains),
        lead=_study_lead(study, analysis),
        tiles=tuple(_study_tiles(analysis, gains)),
        cautions=limits,
        cases=cases,
    )


@dataclass(frozen=True)
class _Gain:
    """A case's representative row, judged against fp32."""

    case: CaseAnalysis
    row: Row
    judged: Judgement

    @property
    def ratio(self) -> float:
        """Its speed divided by fp32's."""
        return self.judged.speed.ratio.value

    @property
    def once(self) -> bool:
        """Whether the noise is unknown."""
        return self.judged.speed.word == "once"

    @property
    def name(self) -> str:
        return f"{self.case.case.label}, {units.bits_name(self.row['bits'])}"


def _study_headline(analysis: Analysis, gains: list[_Gain]) -> str:
    if not gains:
        return _study_scaling_headline(analysis)
    once = " (one run)" if any(gain.once for gain in gains) else ""
    pays = [gain for gain in gains if gain.judged.word == "yes"]
    if pays:
        best = max(pays, key=lambda gain: gain.ratio)
        where = f"In {len(pays)} of {units.count(len(gains), 'case')}"
        return (
            f"{where} compressing pays: QSGD trains up to {units.times(best.ratio)} as fast as "
            f"fp32 ({best.name})"
        )
    if all(gain.once for gain in gains):
        span = units.span([gain.ratio for gain in gains], units.times)
        count = units.count(len(gains), "case")
        return f"In {count} QSGD trained at {span} the speed of fp32{once}"
    where = f"In none of {len(gains)} cases" if len(gains) > 1 else "In no case"
    if all(gain.judged.word == "no" for gain in gains):
        return f"{where} does compressing pay"
    return f"{where} is it shown that compressing pays{once}"


def _declines(gains: list[_Gain]) -> str:
    count = sum(declines(gain.case, gain.row) for gain in gains)
    return f"; {units.count(count, 'case')} slower than on fewer ranks" if count else ""


def _study_scaling_headline(analysis: Analysis) -> str:
    rows = [row for case in analysis.cases for row in largest_rows(case)]
    count, once = len(analysis.cases), once_note(rows)
    nodes = units.span([row["nodes"] for row in rows], units.nodes_name)
    if all(case.rows()[0]["ranks"] == case.rows()[-1]["ranks"] for case in analysis.cases):
        return f"{count} cases on {nodes}{once}"
    reached = units.span([row["speedup"] for row in rows], units.times)
    ideal = units.span([row["efficiency"] for row in rows], units.percent)
    return f"{count} cases on {nodes} speed up {reached}, {ideal} of ideal{once}"


def _study_lead(study: Study, analysis: Analysis) -> str:
    rows = [row for case in analysis.cases for row in case.rows()]
    smallest, largest = min(r["ranks"] for r in rows), max(r["ranks"] for r in rows)
    span = f"{smallest} to {largest}" if smallest != largest else f"{largest}"
    runs = sum(len(case.runs) for case in analysis.cases)
    held = (
        "the global batch of each case is the same at every size"
        if study.mode == "strong"
        else "each rank keeps its case's batch at every size"
    )
    return (
        f"{len(analysis.cases)} cases on {span} ranks, {runs} measurements; {held}. A "
        "measurement of one rank is used in every case that shares it."
    )


def _study_tiles(analysis: Analysis, gains: list[_Gain]) -> Iterator[Tile]:
    yield Tile("Cases", str(len(analysis.cases)), "", _units(analysis))
    rows = [(case, row) for case in analysis.cases for row in largest_rows(case)]
    if grown := [(case, row) for case, row in rows if row["ranks"] > case.reference[0]]:
        case, row = max(grown, key=lambda pair: pair[1]["efficiency"])
        yield Tile(
            "Highest efficiency",
            units.percent(row["efficiency"]),
            "of ideal",
            f"{case.case.label}, {units.nodes_name(row['nodes'])}, {units.bits_name(row['bits'])}",
        )
    if gains:
        for label, gain in (
            ("Highest speed", max(gains, key=lambda g: g.ratio)),
            ("Lowest speed", min(gains, key=lambda g: g.ratio)),
        ):
            detail = f"{gain.name}{_NOISE.get(gain.judged.speed.word, '')}"
            yield Tile(label, units.times(gain.ratio), "the speed of fp32", detail)


def _units(analysis: Analysis) -> str:
    units = list(dict.fromkeys(case.unit for case in analysis.cases))
    return "throughput in " + ", ".join(f"{unit}/s" for unit in units)
