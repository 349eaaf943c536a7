"""Table of a case from its runs: medians, intervals and ratios (scaling/README.md)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from qsgd_hpc.scaling.analysis.results import BREAKDOWN, COLUMNS
from qsgd_hpc.scaling.analysis.stats import interval, ratio_interval
from qsgd_hpc.scaling.define.plan import PLAIN_BITS

__all__ = ["SIZE", "table_of"]

SIZE = ["nodes", "ranks", "bits"]
# Parts of one step: medians of each would not add up.
_OF_ONE_RUN = (*BREAKDOWN, "hidden_s", "coding_s", "exposed_share", "comm_time_share")

_WORST = ("link_bits_s", "link_share")


def table_of(runs: pd.DataFrame) -> tuple[pd.DataFrame, tuple[int, int]]:
    """Reduce runs to one row per (nodes, ranks, bits), columns COLUMNS.

    Args:
        runs: one row per measurement, in the order of the table.
    Returns:
        The table, and (ranks, bits) of the row whose speed-up is 1: the fewest ranks at 32 bit, or,
        if nothing was measured at 32 bit, the fewest ranks at the most bits.
    """
    table = _medians(runs)
    reference = _reference(table)
    _speedups(table, runs, reference)
    table["compression_ratio"] = _compression(table)
    ranks, bits = (int(table.loc[reference, name]) for name in ("ranks", "bits"))
    return table[list(COLUMNS)].reset_index(drop=True), (ranks, bits)


def _medians(runs: pd.DataFrame) -> pd.DataFrame:
    groups = runs.groupby(SIZE, sort=False)
    medians = groups.median(numeric_only=True).drop(columns="repeat")
    medians[list(_OF_ONE_RUN)] = groups[list(runs.columns)].apply(_typical)[list(_OF_ONE_RUN)]
    # The worst of the repeats: a slow link in one of them affects the medians, too.
    medians[list(_WORST)] = groups[list(_WORST)].min()
    table = medians.replace([math.inf], np.nan).reset_index()
    table["repeats"] = groups.size().to_numpy()
    for name, relative in (("throughput", True), ("test_accuracy", False), ("perplexity", True)):
        spans = [_interval(group[name], relative) for _, group in groups]
        table[f"{name}_lo"], table[f"{name}_hi"] = zip(*spans, strict=True)
    for name in ("test_accuracy_lo", "test_accuracy_hi"):
        table[name] = table[name].clip(0, 1)
    return table


def _typical(group: pd.DataFrame) -> pd.Series:
    """Return the run of median throughput; of an even number, the slower of the middle two."""
    return group.sort_values(["throughput", "repeat"]).iloc[(len(group) - 1) // 2]


def _interval(values: pd.Series, relative: bool) -> tuple[float, float]:
    # Equal values come from repetitions of one deterministic training: they show no noise.
    if values.nunique() < 2:
        return math.nan, math.nan
    return interval(values.dropna().to_numpy(), relative=relative) or (math.nan, math.nan)


def _reference(table: pd.DataFrame) -> Any:
    plain = table[table["bits"] == PLAIN_BITS]
    candidates = table if plain.empty else plain
    return candidates.sort_values(["ranks", "bits"], ascending=[True, False]).index[0]


def _speedups(table: pd.DataFrame, runs: pd.DataFrame, reference: Any) -> None:
    """Add speed-up and efficiency with their intervals, which are exactly 1 for the reference."""
    base = table.loc[reference]
    speeds = {size: group["throughput"].to_numpy() for size, group in runs.groupby(SIZE)}
    below = speeds[tuple(base[SIZE])]
    table["speedup"] = table["throughput"] / base["throughput"]
    spans = [
        ratio_interval(speeds[tuple(row)], below) or (math.nan, math.nan)
        for row in table[SIZE].itertuples(index=False)
    ]
    table["speedup_lo"], table["speedup_hi"] = zip(*spans, strict=True)
    if base["repeats"] > 1:
        table.loc[reference, ["speedup_lo", "speedup_hi"]] = 1.0
    for end in ("", "_lo", "_hi"):
        table[f"efficiency{end}"] = table[f"speedup{end}"] / (table["ranks"] / base["ranks"])


def _compression(table: pd.DataFrame) -> pd.Series:
    # Against float32 at the same size: the bytes a rank sends depend on how many ranks there are.
    plain = table[table["bits"] == PLAIN_BITS].set_index(["nodes", "ranks"])
    keys = pd.MultiIndex.from_frame(table[["nodes", "ranks"]])
    baseline = plain["wire_bytes_per_step"].reindex(keys).to_numpy()
    ratio = baseline / table["wire_bytes_per_step"]
    return ratio.where(table["wire_bytes_per_step"] > 0)
