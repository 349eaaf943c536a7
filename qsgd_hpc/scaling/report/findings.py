"""Findings of a study as text. Pure; claims no gain that the noise could explain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import Analysis, CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.verdicts import Judgement, largest_rows, representative_judgement
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.report.case_findings import (
    CaseFindings,
    Tile,
    case_findings,
    declines,
    once_note,
)
from qsgd_hpc.scaling.report.cautions import Machine, cautions

__all__ = ["CaseFindings", "Findings", "Tile", "findings"]


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
        headline=_headline(analysis, gains) + _declines(gains),
        lead=_lead(study, analysis),
        tiles=tuple(_tiles(analysis, gains)),
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


def _headline(analysis: Analysis, gains: list[_Gain]) -> str:
    if not gains:
        return _scaling_headline(analysis)
    once = " (one run)" if any(gain.once for gain in gains) else ""
    pays = [gain for gain in gains if gain.judged.word == "yes"]
    if pays:
        best = max(pays, key=lambda gain: gain.ratio)
        where = f"In {len(pays)} of {units.count(len(gains), 'case')}"
        return (
            f"{where} compressing pays: QSGD trains up to {units.times(best.ratio)} as fast as "
            f"fp32 ({best.name}){once}"
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


def _scaling_headline(analysis: Analysis) -> str:
    rows = [row for case in analysis.cases for row in largest_rows(case)]
    count, once = len(analysis.cases), once_note(rows)
    nodes = units.span([row["nodes"] for row in rows], units.nodes_name)
    if all(case.rows()[0]["ranks"] == case.rows()[-1]["ranks"] for case in analysis.cases):
        return f"{count} cases on {nodes}{once}"
    reached = units.span([row["speedup"] for row in rows], units.times)
    ideal = units.span([row["efficiency"] for row in rows], units.percent)
    return f"{count} cases on {nodes} speed up {reached}, {ideal} of ideal{once}"


def _lead(study: Study, analysis: Analysis) -> str:
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


def _tiles(analysis: Analysis, gains: list[_Gain]) -> Iterator[Tile]:
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
