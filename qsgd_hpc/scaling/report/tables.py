"""Tables of a study for other uses: LaTeX for a paper, and CSV rows of the speeds of many machines.

LaTeX needs only booktabs. The columns of the rows are independent of site and scheduler: system,
devices, sizes, workload, median speed, and versions.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.cells import cells, headings
from qsgd_hpc.scaling.report.findings import reference_name
from qsgd_hpc.scaling.store.attempts import Attempt, throughput

__all__ = ["COLUMNS", "latex_tables", "rows", "to_csv"]

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    # In mathematics, because some engines and fonts lack these signs in text.
    "×": r"$\times$",
    "–": "--",
    "−": r"$-$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "’": "'",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
}
# In text, two dots mark a range; in the table it is an en dash.
_RANGE = ".."
# Columns left out because a page of an article is narrower than a screen.
_LEFT_OUT = ("total_bytes", "communication", "step", "compression", "nmse", "target")


def _escape(text: str) -> str:
    """Return text escaped for LaTeX; other non-ASCII characters are unchanged."""
    return "".join(_ESCAPES.get(sign, sign) for sign in text)


def latex_tables(cases: Sequence[CaseAnalysis], source: str) -> str:
    """Return one table for each case, to be read with \\input; `source` becomes a comment."""
    comment = " ".join(source.split())
    head = f"% {comment}\n% Needs \\usepackage{{booktabs}}.\n"
    return head + "\n".join(_latex_table(case) for case in cases)


def _latex_table(case: CaseAnalysis) -> str:
    """Return a case's results as a table float with caption and label."""
    columns = [(key, name) for key, name in headings(case) if key not in _LEFT_OUT]
    rows = case.rows()
    several = case.table["throughput_lo"].notna().any()
    brackets = r"; in brackets: 95\% intervals" if several else ""
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize",
        r"  \setlength{\tabcolsep}{3pt}",
        f"  \\caption{{Scaling of {_escape(case.case.label)}. Speed-up refers to "
        f"{_escape(reference_name(case))}{brackets}.}}",
        f"  \\label{{tab:scaling-{_label(case.case.key)}}}",
        f"  \\begin{{tabular}}{{rl{'r' * (len(columns) - 2)}}}",
        r"    \toprule",
        *(f"    {' & '.join(line)} \\\\" for line in _heads([name for _, name in columns])),
        r"    \midrule",
    ]
    before = None
    for row in rows:
        if before not in (None, row["ranks"]):
            lines.append(r"    \addlinespace")
        before = row["ranks"]
        text = cells(row, case)
        lines.append(f"    {' & '.join(_cell(text, key) for key, _ in columns)} \\\\")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _heads(names: Sequence[str]) -> list[list[str]]:
    """Return the headings as two lines, for narrow columns."""
    parts = [name.partition(" ") for name in names]
    return [[_escape(first) for first, _, _ in parts], [_escape(rest) for _, _, rest in parts]]


def _cell(text: dict[str, str], key: str) -> str:
    spread = text["speed_range"].replace(_RANGE, "–") if key == "speed" else ""
    return _escape(f"{text[key]} ({spread})" if spread else text[key])


def _label(key: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in key)


_VERSIONS = ("python", "torch", "tensorflow", "keras", "jax", "qsgd_hpc")
COLUMNS = (
    *("date", "system", "cpu", "gpu", "gpus", "nodes", "ranks", "network"),
    *("workload", "framework", "bits", "algorithm", "global_batch_size"),
    *("throughput_median", "unit", "warmup_steps", "repeats"),
    *_VERSIONS,
    "mpi",
)


def rows(attempts: Iterable[Attempt], system: str) -> list[dict[str, Any]]:
    """Return the rows of these attempts, in the order of the sizes.

    Args:
        attempts: one for each point, without fault.
        system: name of the machine.
    """
    groups: dict[tuple[Any, ...], list[Attempt]] = {}
    for each in attempts:
        point = each.point
        key = (point.case, point.nodes, point.ranks, point.bits)
        groups.setdefault(key, []).append(each)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0].key, *item[0][1:3], -item[0][3]))
    return [_row(case, size, runs, system) for (case, *size), runs in ordered]


def _row(case: Any, size: Sequence[Any], runs: Sequence[Attempt], system: str) -> dict[str, Any]:
    nodes, ranks, bits = size
    finals = [run.final for run in runs]
    first = finals[0]
    gpus = first.get("place", {}).get("gpus", [])
    versions: Mapping[str, Any] = first.get("versions", {})
    return {
        "date": min(str(final.get("time", ""))[:10] for final in finals),
        "system": system,
        "cpu": first.get("cpu"),
        "gpu": first.get("gpu") or (gpus[0] if gpus else None),
        "gpus": len(gpus) * nodes,
        "nodes": nodes,
        "ranks": ranks,
        "network": case.network or None,
        "workload": case.workload,
        "framework": case.framework or next((n for n in _VERSIONS[1:-1] if n in versions), None),
        "bits": bits,
        "algorithm": case.algorithm,
        "global_batch_size": first.get("global_batch_size"),
        "throughput_median": statistics.median(throughput(final)[0] for final in finals),
        "unit": f"{throughput(first)[1]}/s",
        "warmup_steps": first.get("warmup_steps"),
        "repeats": len(runs),
        **{name: versions.get(name) for name in _VERSIONS},
        "mpi": first.get("mpi"),
    }


def to_csv(table: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV with a heading; unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
