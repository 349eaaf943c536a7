"""A table row as text: the same in the terminal, Markdown, HTML and the charts' tooltips."""

from __future__ import annotations

from collections.abc import Callable

from qsgd_hpc.launch.cluster.network import SHORT, bits_per_s
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Row

__all__ = ["SORTED_BY", "cells", "headings", "interval", "place", "size"]

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
