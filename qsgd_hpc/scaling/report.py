"""Write a study's report from its raw records: page, Markdown, CSV and plots.

Nothing but the records and the definition goes in, not even the clock: the same records give the
same bytes, so every number can be recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.analyse import Analysis, analyse
from qsgd_hpc.scaling.attempts import finished
from qsgd_hpc.scaling.findings import Findings, findings
from qsgd_hpc.scaling.folder import StudyFolder
from qsgd_hpc.scaling.origins import Origins, origins
from qsgd_hpc.scaling.plan import plan
from qsgd_hpc.scaling.plots import charts, write_sheet
from qsgd_hpc.scaling.study import Study

__all__ = ["Report", "cells", "load", "write"]

COUNTS = ("wire_bytes_total", "steps", "global_batch_size")
HEADINGS = (
    ("nodes", "Nodes"),
    ("bits", "Bits"),
    ("speed", "Images/s"),
    ("speedup", "Speed-up"),
    ("efficiency", "Efficiency"),
    ("step_bytes", "Wire / step"),
    ("total_bytes", "Wire total"),
    ("compression", "Fewer bytes"),
    ("communication", "Comm. time"),
    ("accuracy", "Test accuracy"),
)


@dataclass(frozen=True)
class Report:
    """All that the report shows, before it takes a form."""

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
    analysis = analyse(attempts)
    if analysis is None:
        raise UsageError(
            f"{str(folder.path)!r}: no point of this study is finished, so there is nothing to "
            "report. Run the same `qsgd-hpc scale` command again to measure it."
        )
    done = finished(attempts)
    where = origins(list(done.values()))
    missing = [p.key for p in plan(study) if p.key not in done]
    incidents = [
        f"{a.point.label}, repeat {a.point.repeat}, attempt {a.number}: {a.fault}; not used."
        for a in attempts
        if a.fault is not None
    ]
    incidents += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    if torn:
        lines = ", ".join(map(str, torn))
        incidents.append(f"records.jsonl: unreadable (torn by a crash?) and skipped: line {lines}.")
    incidents += [
        f"{a.point.label}, repeat {a.point.repeat}: {a.torn_lines} unreadable record(s) skipped."
        for a in attempts
        if a.torn_lines
    ]
    return Report(
        study=study,
        analysis=analysis,
        findings=findings(study, analysis, one_machine=where.one_machine and max(study.nodes) > 1),
        origins=where,
        incidents=tuple(incidents),
    )


def write(report: Report, target: Path) -> Path:
    """Write REPORT.md, report.html, results.csv, plot.png and plot.svg; return the page's path.

    Raises:
        UsageError: the folder cannot be written.
    """
    context = _context(report)
    try:
        target.mkdir(parents=True, exist_ok=True)
        table = report.analysis.table.astype(dict.fromkeys(COUNTS, "Int64"))
        table.to_csv(target / "results.csv", index=False, float_format="%.9g")
        write_sheet(report.analysis, report.findings.headline, context["subtitle"], target / "plot")
        (target / "REPORT.md").write_text(_render("report.md.j2", context), encoding="utf-8")
        page = target / "report.html"
        context["charts"] = charts(report.analysis)
        page.write_text(_render("report.html.j2", context), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"report folder {str(target)!r} cannot be written: {error.strerror}. "
            "Choose another with -o DIR."
        ) from None
    return page


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row as text, keyed like HEADINGS."""
    sends = row["ranks"] > 1
    several = row["repeats"] > 1
    low, high = row["images_per_s_min"], row["images_per_s_max"]
    worst, best = row["test_accuracy_min"], row["test_accuracy_max"]
    return {
        "nodes": str(row["nodes"])
        if row["nodes"] == row["ranks"]
        else f"{row['nodes']} ({row['ranks']} ranks)",
        "bits": words.bits_name(row["bits"]),
        "speed": words.speed(row["images_per_s"]),
        "speed_range": f"{words.speed(low)}..{words.speed(high)}" if several else "",
        "speedup": words.times(row["speedup"]),
        "efficiency": words.percent(row["efficiency"]),
        "step_bytes": words.bytes_short(row["wire_bytes_per_step"]),
        "total_bytes": words.bytes_short(row["wire_bytes_total"]),
        "compression": words.times(row["compression_ratio"]) if sends else words.MISSING,
        "communication": words.percent(row["comm_time_share"]),
        "accuracy": words.accuracy(row["test_accuracy"]),
        "accuracy_range": f"{words.accuracy(worst)}..{words.accuracy(best)}"
        if several and worst is not None
        else "",
    }


def _context(report: Report) -> dict[str, Any]:
    study = report.study
    repeats = "1 repeat" if study.repeats == 1 else f"{study.repeats} repeats"
    ranks, bits = report.analysis.reference
    return {
        "study": study,
        "findings": report.findings,
        "origins": report.origins,
        "incidents": report.incidents,
        "dataset": report.analysis.dataset,
        "headings": HEADINGS,
        "rows": [{**cells(row), "raw_bits": row["bits"]} for row in report.analysis.rows()],
        "reference": f"{ranks} {'rank' if ranks == 1 else 'ranks'} at {words.bits_name(bits)}",
        "cautions": [*report.findings.cautions, *report.origins.cautions],
        "subtitle": f"{study.script.name}  ·  {study.mode} scaling  ·  site {study.site}  ·  "
        f"{repeats}",
    }


def _render(name: str, context: Mapping[str, Any]) -> str:
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
