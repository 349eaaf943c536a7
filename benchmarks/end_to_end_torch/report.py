"""The measurements of all ranks, as one record and as a table."""

from __future__ import annotations

import datetime
import statistics
from typing import Any

import torch
from contestants import ALONE, Contestant
from tasks import Task

import qsgd_hpc
import qsgd_hpc.torch as hvd

SCHEMA = 1
LAST_LOSSES = 8  # batches whose mean is the final loss


def summarise(
    contestants: list[Contestant], task: Task, *, where: str, batch: int
) -> dict[str, Any]:
    """Return the record, equal on all ranks; collective.

    Seconds are the slowest rank's, turn by turn; losses are means over the ranks.
    """
    rows = [_row(contestant, task) for contestant in contestants]
    alone_s = next(row["median_s"] for row in rows if row["what"] == ALONE)
    for row in rows:
        row["exposed_s"] = row["median_s"] - alone_s
    return {
        "schema": SCHEMA,
        "version": qsgd_hpc.__version__,
        "date": datetime.date.today().isoformat(),
        "mpi": hvd.mpi_library_version().partition("\n")[0].strip("\0"),
        "torch": torch.__version__,
        "where": where,
        "ranks": hvd.size(),
        "task": task.title,
        "unit": task.unit,
        "batch": batch,
        "parameters": sum(p.numel() for p in contestants[0].model.parameters()),
        "rows": rows,
    }


def _row(contestant: Contestant, task: Task) -> dict[str, Any]:
    # Without the first turn, which is a warm-up.
    seconds = _over_ranks(contestant.seconds[1:], hvd.Max)
    median_s = statistics.median(seconds)
    return {
        "what": contestant.what,
        "median_s": median_s,
        "per_s": task.units_a_step * hvd.size() / median_s,
        "wire_bytes": contestant.wire_bytes,
        "steps": contestant.steps,
        "cpu_s": statistics.median(_over_ranks(contestant.cpu_seconds[1:], hvd.Average)),
        "loss": statistics.mean(_over_ranks(contestant.losses[-LAST_LOSSES:], hvd.Average)),
        "samples_s": [round(s, 5) for s in seconds],
    }


def _over_ranks(values: list[float], op: Any) -> list[float]:
    reduced: list[float] = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=op).tolist()
    return reduced


def describe(record: dict[str, Any]) -> str:
    """Return the table."""
    rows = record["rows"]
    unit = record["unit"]
    lines = [
        f"{record['task']}: {record['parameters'] / 1e6:.1f} million parameters, batch "
        f"{record['batch']} on each of {record['ranks']} ranks, {record['where'] or 'here'}",
        f"{'':22}{unit + '/s':>10}{'step ms':>10}{'exposed ms':>12}{'of step':>9}"
        f"{'CPU ms':>8}{'sent MB':>9}{'loss':>8}  after {rows[0]['steps']} steps",
    ]
    for row in rows:
        sent = "" if row["wire_bytes"] is None else f"{row['wire_bytes'] / 1e6:.2f}"
        lines.append(
            f"{row['what']:22}{row['per_s']:10.1f}{row['median_s'] * 1e3:10.1f}"
            f"{row['exposed_s'] * 1e3:12.1f}{row['exposed_s'] / row['median_s']:9.0%}"
            f"{row['cpu_s'] * 1e3:8.0f}{sent:>9}{row['loss']:8.3f}"
        )
    return "\n".join(lines)
