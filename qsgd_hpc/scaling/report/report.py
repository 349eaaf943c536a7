"""Write a study's report from its raw records: page, Markdown, tables and plots.

The report depends only on the records and the definition, not on the time of writing: the same
records give the same bytes, so every number can be recomputed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.results import Analysis, CaseAnalysis
from qsgd_hpc.scaling.define.plan import plan
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.report import latex, page
from qsgd_hpc.scaling.report.compare import Comparison
from qsgd_hpc.scaling.report.drawing.output import write_files, write_networks, write_sheet
from qsgd_hpc.scaling.report.findings import Findings, findings
from qsgd_hpc.scaling.report.networks import families
from qsgd_hpc.scaling.report.origins import Origins, origins
from qsgd_hpc.scaling.store.attempts import Attempt, finished
from qsgd_hpc.scaling.store.folder import StudyFolder, writing

__all__ = ["Report", "load", "results", "write"]

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
        text = latex.tables(report.analysis.cases, f"qsgd-hpc: {source}")
        (target / "results.tex").write_text(text, encoding="utf-8")
        plots = [
            _plots(report, case, found.headline, target)
            for case, found in zip(report.analysis.cases, report.findings.cases, strict=True)
        ]
        for number, family in enumerate(families(report.analysis.cases), 1):
            write_networks(family, target / f"networks-{number}")
        context = page.context(report, plots, comparison)
        markdown = page.render("report.md.j2", context)
        (target / "REPORT.md").write_text(markdown, encoding="utf-8")
        made = target / "report.html"
        made.write_text(page.render("report.html.j2", context), encoding="utf-8")
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
    prefix = "" if len(report.analysis.cases) == 1 else f"{page.slug(case.case.key)}/"
    folder = target / prefix
    folder.mkdir(exist_ok=True)
    write_sheet(case, headline, page.subtitle(report, case), folder / "plot")
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
