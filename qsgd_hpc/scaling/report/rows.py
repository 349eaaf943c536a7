"""CSV rows, one per size, for a collection of speeds of many machines.

The columns are independent of site and scheduler: system, devices, sizes, workload, median speed,
and versions.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qsgd_hpc.scaling.store.attempts import Attempt, is_number, throughput

__all__ = ["COLUMNS", "rows", "to_csv"]

_VERSIONS = ("python", "torch", "tensorflow", "keras", "jax", "qsgd_hpc")
COLUMNS = (
    "date",
    "system",
    "cpu",
    "gpu",
    "gpus",
    "nodes",
    "ranks",
    "network",
    "workload",
    "framework",
    "bits",
    "algorithm",
    "global_batch_size",
    "throughput_median",
    "unit",
    "warmup_steps",
    "repeats",
    *_VERSIONS,
    "mpi",
)


def rows(attempts: Iterable[Attempt], system: str) -> list[dict[str, Any]]:
    """Return the rows of the attempts without fault, in the order of the sizes.

    Args:
        attempts: one for each point.
        system: name of the machine.
    """
    groups: dict[tuple[Any, ...], list[Attempt]] = {}
    for each in attempts:
        if each.fault is None:
            point = each.point
            key = (point.case, point.nodes, point.ranks, point.bits)
            groups.setdefault(key, []).append(each)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0].key, *item[0][1:3], -item[0][3]))
    return [_row(case, size, runs, system) for (case, *size), runs in ordered]


def _row(case: Any, size: Sequence[Any], runs: Sequence[Attempt], system: str) -> dict[str, Any]:
    nodes, ranks, bits = size
    finals = [run.final for run in runs]
    first = finals[0]
    speeds = [speed for final in finals if is_number(speed := throughput(final)[0])]
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
        "throughput_median": statistics.median(speeds),
        "unit": f"{throughput(first)[1]}/s",
        "warmup_steps": first.get("warmup_steps"),
        "repeats": len(speeds),
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
