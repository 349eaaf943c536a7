"""Rendering of the templates of the HTML page and of the Markdown report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from qsgd_hpc._data import data
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report import compare
from qsgd_hpc.scaling.report.case_findings import law_sentence, link_sentence, reference_name
from qsgd_hpc.scaling.report.cautions import Machine
from qsgd_hpc.scaling.report.cells import SORTED_BY, cells, headings, size
from qsgd_hpc.scaling.report.drawing.bars import network_panels
from qsgd_hpc.scaling.report.drawing.output import chart, charts
from qsgd_hpc.scaling.report.drawing.speed import best_fits
from qsgd_hpc.scaling.report.findings import CaseFindings
from qsgd_hpc.scaling.report.networks import Family, families

if TYPE_CHECKING:
    from qsgd_hpc.scaling.report.report import Report

__all__ = ["context", "render", "slug", "subtitle"]


def context(
    report: Report, plots: Sequence[Sequence[str]], comparison: compare.Comparison | None
) -> dict[str, Any]:
    """Return the values for the templates.

    Args:
        report: the report.
        plots: stems of each case's plot files, relative to the report.
        comparison: comparison with another study; None omits its section.
    """
    cases = report.analysis.cases
    sections = [
        _section(report, case, found, stems)
        for case, found, stems in zip(cases, report.findings.cases, plots, strict=True)
    ]
    return {
        "study": report.study,
        "findings": report.findings,
        "sections": sections,
        "networks": [_network_section(f, i) for i, f in enumerate(families(cases), 1)],
        "several": len(sections) > 1,
        "subtitle": subtitle(report, cases[0] if len(cases) == 1 else None),
        "origins": report.origins,
        "incidents": report.incidents,
        "cautions": [*report.findings.cautions, *report.origins.cautions],
        "comparison": None if comparison is None else compare.section(comparison),
    }


def _network_section(family: Family, number: int) -> dict[str, Any]:
    place = f"networks-{number}"
    return {
        "id": place,
        "family": family,
        "headings": family.headings(),
        "rows": list(family.table()),
        "charts": [chart(panel, place) for panel in network_panels(family)],
        "plot": place,
    }


def subtitle(report: Report, case: CaseAnalysis | None) -> str:
    """Return the facts above the headline of a case, or of the report."""
    study = report.study
    title = study.title if case is None else case.case.label
    repeats = units.count(study.repeats, "repeat")
    facts = [title, f"{study.mode} scaling", f"site {study.site}", repeats]
    if report.origins.machine is Machine.EMULATED:
        facts.append("hosts and network emulated on one machine")
    return "  ·  ".join(facts)


def slug(text: str) -> str:
    """Return a name that is valid as an id, in a link and as a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def render(name: str, context: Mapping[str, Any]) -> str:
    """Fill a template; in HTML every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(
            lambda file: data("templates").joinpath(file).read_text(encoding="utf-8")
        ),
        autoescape=name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["pipe"] = lambda text: str(text).replace("|", "\\|")
    return environment.get_template(name).render(context)


def _section(
    report: Report, case: CaseAnalysis, found: CaseFindings, plots: Sequence[str]
) -> dict[str, Any]:
    place = slug(case.case.key)
    rows = case.rows()
    best = best_fits(case)
    return {
        "id": place,
        "case": case,
        "findings": found,
        "subtitle": subtitle(report, case),
        "charts": charts(case, place),
        "series": [
            (str(b), units.bits_name(b)) for b in sorted({r["bits"] for r in rows}, reverse=True)
        ],
        "headings": headings(case),
        "rows": [
            {
                **cells(row, case),
                "size": size(row),
                "raw_bits": row["bits"],
                "raw_ranks": row["ranks"],
                "sort": {
                    **{k: row[c] for k, c in SORTED_BY.items()},
                    "quality": row.get(case.quality),
                },
            }
            for row in rows
        ],
        "reference": reference_name(case),
        "laws": [*map(law_sentence, best), *([link_sentence(case.link)] if case.link else ())],
        "other_laws": [law_sentence(fit) for fit in case.fits if fit not in best],
        "verdicts": [
            {
                "bits": units.bits_name(v.bits),
                "raw_bits": v.bits,
                "verdict": v.verdict,
                "word": v.verdict.capitalize(),
                "reason": v.reason,
            }
            for v in case.break_even
        ],
        "plots": plots,
    }
