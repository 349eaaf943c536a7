"""Tables of a study: a row as text, LaTeX for a paper, CSV rows of the speeds of many machines.

The text of a row is the same in the terminal, Markdown, HTML and the charts' tooltips. LaTeX needs
only booktabs. The columns of the CSV rows are independent of site and scheduler: system, devices,
sizes, workload, median speed, and versions.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qsgd_hpc.launch.cluster.network import SHORT, bits_per_s
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Row
from qsgd_hpc.scaling.report.findings import reference_name
from qsgd_hpc.scaling.store import Attempt, throughput

__all__ = [
    "COLUMNS",
    "SORTED_BY",
    "cells",
    "headings",
    "interval",
    "latex_tables",
    "place",
    "rows",
    "size",
    "to_csv",
]

# Key, name, and the column of the table, by which a click on the heading sorts.
_HEADINGS = (
    ("nodes", "Nodes", "ranks"),
    ("bits", "Bits", "bits"),
    ("speed", "{unit}/s", "throughput"),
    ("speedup", "Speed-up", "speedup"),
    ("efficiency", "Efficiency", "efficiency"),
    ("step", "Step", "step_s"),
    ("exposed", "Exposed comm.", "exposed_share"),
    ("step_bytes", "Wire / step", "wire_bytes_per_step"),
    ("total_bytes", "Wire total", "wire_bytes_total"),
    ("compression", "Fewer bytes", "compression_ratio"),
    ("nmse", "NMSE", "nmse"),
    ("communication", "Comm. time", "comm_time_share"),
    ("quality", "{quality}", None),  # the column depends on the case
    ("target", "To target", "time_to_target_s"),
    ("link", "Link reached", "link_bits_s"),
)
SORTED_BY = {key: column for key, _, column in _HEADINGS if column is not None}


def headings(case: CaseAnalysis) -> list[tuple[str, str]]:
    """Return (key, name) of the columns that have values; results.csv has all columns."""
    names = {
        "unit": units.capitalised(case.unit),
        "quality": units.quality_name(case.quality) if case.quality else "",
    }
    empty = {key for key, column in SORTED_BY.items() if not case.table[column].notna().any()}
    empty |= set() if case.quality else {"quality"}
    if "exposed" not in empty:
        # The exposed share is more useful than the time in collectives, and the row must be short.
        empty |= {"communication", "total_bytes"}
    return [(key, name.format_map(names)) for key, name, _ in _HEADINGS if key not in empty]


def cells(row: Row, case: CaseAnalysis) -> dict[str, str]:
    """Return a table row as text, keyed like the headings; keys with `_range` are intervals."""
    sends = row["ranks"] > 1
    return {
        "nodes": str(row["nodes"])
        if row["nodes"] == row["ranks"]
        else f"{row['nodes']} ({row['ranks']} ranks)",
        "bits": units.bits_name(row["bits"]),
        "speed": units.speed(row["throughput"]),
        "speed_range": _range(row, "throughput", units.speed),
        "speedup": units.times(row["speedup"]),
        "efficiency": units.percent(row["efficiency"]),
        "step": units.seconds(row["step_s"]),
        "exposed": units.percent(row["exposed_share"]),
        "step_bytes": units.bytes_short(row["wire_bytes_per_step"]),
        "total_bytes": units.bytes_short(row["wire_bytes_total"]),
        "compression": units.times(row["compression_ratio"]) if sends else units.MISSING,
        "nmse": units.nmse(row["nmse"]),
        "communication": units.percent(row["comm_time_share"]),
        "quality": units.quality(case.quality, row.get(case.quality)),
        "quality_range": _range(row, case.quality, lambda v: units.quality(case.quality, v)),
        "target": units.seconds(row["time_to_target_s"]),
        "link": _link(row),
    }


def _link(row: Row) -> str:
    """Return the rate that the slowest link reached, marked if below the network's rate."""
    if row["link_bits_s"] is None:
        return units.MISSING
    return f"{bits_per_s(row['link_bits_s'])}{' (short)' if row['link_share'] < SHORT else ''}"


def place(row: Row) -> str:
    """Return where a row was measured, such as '2 nodes, 4 bit'."""
    return f"{size(row)}, {units.bits_name(row['bits'])}"


def size(row: Row) -> str:
    """Return the size of a row, such as '2 nodes' or '2 nodes (8 ranks)'."""
    ranks = "" if row["nodes"] == row["ranks"] else f" ({row['ranks']} ranks)"
    return f"{units.nodes_name(row['nodes'])}{ranks}"


def interval(row: Row, name: str, form: Callable[[float], str]) -> str:
    """Return a value's 95 % interval as text, and the number of runs."""
    text = _range(row, name, form)
    runs = "one run" if row["repeats"] == 1 else f"{row['repeats']} runs"
    return f"95% interval {text}, {runs}" if text else runs


def _range(row: Row, name: str, form: Callable[[float], str]) -> str:
    low, high = row.get(f"{name}_lo"), row.get(f"{name}_hi")
    return "" if low is None or high is None else f"{form(low)}..{form(high)}"


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
    label = re.sub("[^A-Za-z0-9-]", "-", case.case.key)
    brackets = r"; in brackets: 95\% intervals" if several else ""
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \footnotesize",
        r"  \setlength{\tabcolsep}{3pt}",
        f"  \\caption{{Scaling of {_escape(case.case.label)}. Speed-up refers to "
        f"{_escape(reference_name(case))}{brackets}.}}",
        f"  \\label{{tab:scaling-{label}}}",
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
