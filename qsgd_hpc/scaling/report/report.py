"""Write a study's report from its raw records: page, Markdown, tables and plots.

The report depends only on the records and the definition, not on the time of writing: the same
records give the same bytes, so every number can be recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.results import Analysis, CaseAnalysis
from qsgd_hpc.scaling.define.study import Study, plan
from qsgd_hpc.scaling.report.cautions import Machine
from qsgd_hpc.scaling.report.compare import Comparison, section
from qsgd_hpc.scaling.report.drawing.bars import network_panels
from qsgd_hpc.scaling.report.drawing.lines import best_fits
from qsgd_hpc.scaling.report.drawing.output import (
    chart,
    charts,
    write_files,
    write_networks,
    write_sheet,
)
from qsgd_hpc.scaling.report.findings import (
    CaseFindings,
    Findings,
    findings,
    law_sentence,
    link_sentence,
    reference_name,
)
from qsgd_hpc.scaling.report.networks import Family, families
from qsgd_hpc.scaling.report.origins import Origins, origins
from qsgd_hpc.scaling.report.tables import SORTED_BY, cells, headings, latex_tables, size
from qsgd_hpc.scaling.store import Attempt, StudyFolder, finished, writing

__all__ = ["Report", "context", "load", "render", "results", "write"]

# Unmeasured points to name; `qsgd-hpc scale --dry-run` lists all.
FEW = 3
COUNTS = ("wire_bytes_total", "steps", "global_batch_size")


@dataclass(frozen=True)
class Report:
    """The complete content of a report, independent of its format."""

    study: Study
    analysis: Analysis
    findings: Findings
    origins: Origins
    incidents: tuple[str, ...]


def load(folder: StudyFolder) -> Report:
    """Read a study and compute its report.

    Raises:
        UsageError: no study in the folder, or none of its points is finished.
    """
    study = folder.study()
    attempts, torn = folder.attempts()
    targets = {case: study.program(case).target for case in study.cases}
    analysis = analyse(
        attempts, mode=study.mode, cases=study.cases, target=targets, site=study.site
    )
    if not analysis.cases and analysis.cautions:
        raise UsageError(
            f"{str(folder.path)!r}: no measurement can be used; there is no report. "
            + " ".join(analysis.cautions)
        )
    if not analysis.cases:
        raise UsageError(
            f"{str(folder.path)!r}: no point of this study is finished; there is no report. Run "
            "the same `qsgd-hpc scale` command again to measure it."
        )
    done = finished(attempts)
    where = origins(list(done.values()))
    machine = where.machine if max(study.nodes) > 1 else None
    return Report(
        study=study,
        analysis=analysis,
        findings=findings(study, analysis, machine=machine),
        origins=where,
        incidents=_incidents(study, attempts, torn),
    )


def write(report: Report, target: Path, comparison: Comparison | None = None) -> Path:
    """Write report.html, REPORT.md, results.csv, results.tex and the plots; return the page.

    With one case, its plots are in the folder of the page; with several, each case has a folder.

    Raises:
        UsageError: the folder cannot be written.
    """
    with writing("report folder", target):
        target.mkdir(parents=True, exist_ok=True)
        results(report.analysis).to_csv(
            target / "results.csv", index=False, float_format="%.9g", encoding="utf-8"
        )
        source = f"{report.study.mode} scaling on site {report.study.site}"
        text = latex_tables(report.analysis.cases, f"qsgd-hpc: {source}")
        (target / "results.tex").write_text(text, encoding="utf-8")
        plots = [
            _plots(report, case, found.headline, target)
            for case, found in zip(report.analysis.cases, report.findings.cases, strict=True)
        ]
        for number, family in enumerate(families(report.analysis.cases), 1):
            write_networks(family, target / f"networks-{number}")
        values = context(report, plots, comparison)
        markdown = render("report.md.j2", values)
        (target / "REPORT.md").write_text(markdown, encoding="utf-8")
        made = target / "report.html"
        made.write_text(render("report.html.j2", values), encoding="utf-8")
    return made


def results(analysis: Analysis) -> pd.DataFrame:
    """Return the tables of all cases as one, with the case's columns and the unit first."""
    tables = []
    for case in analysis.cases:
        table = case.table.copy()
        for place, (name, value) in enumerate({**asdict(case.case), "unit": case.unit}.items()):
            table.insert(place, name, value)
        # The median of an even number of counts may lie between two of them.
        table[list(COUNTS)] = table[list(COUNTS)].astype(float).round()
        tables.append(table.astype(dict.fromkeys(COUNTS, "Int64")))
    return tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)


def _plots(report: Report, case: CaseAnalysis, headline: str, target: Path) -> list[str]:
    # The report contains relative paths.
    prefix = "" if len(report.analysis.cases) == 1 else f"{slug(case.case.key)}/"
    folder = target / prefix
    folder.mkdir(exist_ok=True)
    write_sheet(case, headline, subtitle(report, case), folder / "plot")
    return [f"{prefix}{name}" for name in ("plot", *write_files(case, folder))]


def _incidents(study: Study, attempts: list[Attempt], torn: list[int]) -> tuple[str, ...]:
    done = finished(attempts)
    several = len({a.point.case for a in attempts}) > 1
    incidents = [
        f"{a.point.name(several)}, attempt {a.number}: {a.fault}; not used."
        for a in attempts
        if a.fault is not None
    ]
    points = plan(study)
    if missing := [p for p in points if p.key not in done]:
        first = "; ".join(p.name(len(study.cases) > 1) for p in missing[:FEW])
        more = f"; and {len(missing) - FEW} more" if len(missing) > FEW else ""
        incidents.append(
            f"Not measured yet: {len(missing)} of {len(points)} points ({first}{more})."
        )
    if torn:
        lines = ", ".join(map(str, torn))
        why = "truncated by a crash, or of a newer version?"
        incidents.append(f"records.jsonl: unreadable ({why}) and skipped: line {lines}.")
    incidents += [
        f"{a.point.name(several)}: {a.torn_lines} unreadable record(s) skipped."
        for a in attempts
        if a.torn_lines
    ]
    return tuple(incidents)


def context(
    report: Report, plots: Sequence[Sequence[str]], comparison: Comparison | None
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
        "comparison": None if comparison is None else section(comparison),
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


def render(name: str, values: Mapping[str, Any]) -> str:
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
    return environment.get_template(name).render(values)


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
