"""From attempts to the table of a study: pure functions; scaling/README.md defines every column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from qsgd_hpc.scaling.attempts import Attempt, finished, is_number
from qsgd_hpc.scaling.plan import PLAIN_BITS

__all__ = ["COLUMNS", "Analysis", "analyse"]

# Order of the CSV; a name carries its unit, shares and accuracies run from 0 to 1.
COLUMNS = (
    "nodes",
    "ranks",
    "bits",
    "repeats",
    "images_per_s",
    "images_per_s_min",
    "images_per_s_max",
    "speedup",
    "efficiency",
    "wire_bytes_per_step",
    "wire_bytes_total",
    "compression_ratio",
    "comm_time_share",
    "test_accuracy",
    "test_accuracy_min",
    "test_accuracy_max",
    "steps",
    "global_batch_size",
)


@dataclass(frozen=True)
class Analysis:
    """What a study's records say.

    Attributes:
        table: one row per (nodes, ranks, bits), sorted so that fp32 comes first at each size.
        runs: one row per measurement, the values that the table's medians are taken from.
        reference: (ranks, bits) of the row whose speed-up is 1.
        dataset: what the scripts say they trained on; None when they do not say.
    """

    table: pd.DataFrame
    runs: pd.DataFrame
    reference: tuple[int, int]
    dataset: str | None

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows as dicts, missing values as None."""
        return [
            {k: (None if pd.isna(v) else v) for k, v in row.items()}
            for row in self.table.to_dict("records")
        ]


def analyse(attempts: Iterable[Attempt]) -> Analysis | None:
    """Reduce the finished points of a study to its table; None when no point is finished.

    Speeds, accuracies and shares are medians over the repeats; their smallest and largest value
    stand beside them. Speed-up and efficiency refer to the fewest ranks measured at 32 bit, or,
    when nothing was measured at 32 bit, to the fewest ranks at the most bits.
    """
    measured = list(finished(attempts).values())
    if not measured:
        return None
    runs = pd.DataFrame([_run(attempt) for attempt in measured])
    runs = runs.sort_values(["ranks", "bits", "repeat"], ascending=[True, False, True])
    groups = runs.groupby(["nodes", "ranks", "bits"], sort=False)
    medians = groups.median(numeric_only=True).drop(columns="repeat")
    table = medians.reset_index()
    table["repeats"] = groups.size().to_numpy()
    for name in ("images_per_s", "test_accuracy"):
        table[f"{name}_min"] = groups[name].min().to_numpy()
        table[f"{name}_max"] = groups[name].max().to_numpy()
    reference = _reference(table)
    base = table.loc[reference]
    table["speedup"] = table["images_per_s"] / base["images_per_s"]
    table["efficiency"] = table["speedup"] / (table["ranks"] / base["ranks"])
    table["compression_ratio"] = _compression(table)
    datasets = sorted({str(a.final["dataset"]) for a in measured if a.final.get("dataset")})
    return Analysis(
        table=table[list(COLUMNS)].reset_index(drop=True),
        runs=runs.reset_index(drop=True),
        reference=(int(base["ranks"]), int(base["bits"])),
        dataset=", ".join(datasets) or None,
    )


def _run(attempt: Attempt) -> dict[str, Any]:
    final = attempt.final
    steps = _number(final, "steps")
    wire = _number(final, "wire_bytes")
    total_s = _total_seconds(attempt)
    comm_s = _number(final, "comm_time_s")
    return {
        "nodes": attempt.point.nodes,
        "ranks": attempt.point.ranks,
        "bits": attempt.point.bits,
        "repeat": attempt.point.repeat,
        "images_per_s": _number(final, "images_per_s"),
        "wire_bytes_per_step": wire / steps if steps > 0 else float("nan"),
        "wire_bytes_total": wire,
        "comm_time_share": comm_s / total_s if total_s > 0 else float("nan"),
        "test_accuracy": _number(final, "test_accuracy"),
        "steps": steps,
        "global_batch_size": _number(final, "global_batch_size"),
    }


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if is_number(value) else float("nan")


def _total_seconds(attempt: Attempt) -> float:
    if is_number(attempt.final.get("seconds")):
        return float(attempt.final["seconds"])
    return sum(_number(epoch, "seconds") for epoch in attempt.epochs)


def _reference(table: pd.DataFrame) -> Any:
    plain = table[table["bits"] == PLAIN_BITS]
    candidates = table if plain.empty else plain
    return candidates.sort_values(["ranks", "bits"], ascending=[True, False]).index[0]


def _compression(table: pd.DataFrame) -> pd.Series:
    # Against float32 at the same size: the bytes a rank sends depend on how many ranks there are.
    plain = table[table["bits"] == PLAIN_BITS].set_index(["nodes", "ranks"])
    keys = pd.MultiIndex.from_frame(table[["nodes", "ranks"]])
    baseline = plain["wire_bytes_per_step"].reindex(keys).to_numpy()
    ratio = baseline / table["wire_bytes_per_step"]
    return ratio.where(table["wire_bytes_per_step"] > 0)
