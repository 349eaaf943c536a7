"""Speeds from the records of one run; pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from qsgd_hpc.recording.records import RESERVED

__all__ = ["engine_records", "final_of_engine", "is_number", "throughput"]

# Means over the timed steps of a rank; a run's value is their mean over the ranks.
_MEANS = (
    "step_s",
    "step_mean_s",
    "exposed_s",
    "hidden_s",
    "coding_s",
    "comm_s",
    "comm_time_s",
    "fused_reductions",
    "nmse",
)
_SUMS = ("wire_bytes", "gradient_bytes")
_FIRST = ("steps", "warmup_steps", "warmup_rule", "layers", "backward_s")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a recorded value can be computed with: a number that a finite float holds."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def throughput(record: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the recorded throughput, unchecked, and the unit that it counts.

    Older scripts record a throughput in images as ``images_per_s``.
    """
    if "throughput" in record:
        return record["throughput"], str(record.get("unit") or "samples")
    return record.get("images_per_s"), "images"


def engine_records(records: Sequence[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """Return the last "engine" record of each rank by its number."""
    return {r.get("rank"): r for r in records if r.get("event") == "engine"}


def final_of_engine(
    records: Sequence[Mapping[str, Any]], global_batch: int | None
) -> dict[str, Any]:
    """Make a "final" record from the "engine" records of all ranks; empty if one is missing.

    Throughput is the global batch divided by the median step time of the slowest rank, or steps per
    second if the batch is unknown. The mean is not used: the engine does not see epochs, so a test
    between two of them is part of a step. Values that the engine cannot measure, such as the wait
    for data and the accuracy, stay absent.
    """
    ranks = engine_records(records)
    first = ranks.get(0)
    if first is None or set(ranks) != set(range(first.get("ranks", 0))):
        return {}
    own = [ranks[rank] for rank in sorted(ranks)]
    steps = [r.get("step_s") for r in own]
    if not all(is_number(s) and s > 0 for s in steps):
        return {}
    count, unit = (1, "steps") if global_batch is None else (global_batch, "samples")
    means = {name: _mean([r.get(name) for r in own]) for name in _MEANS}
    sums = {name: _sum([r.get(name) for r in own]) for name in _SUMS}
    return {
        "event": "final",
        "source": "engine",
        "ranks": len(own),
        "throughput": count / max(s for s in steps if s is not None),
        "unit": unit,
        **means,
        **sums,
        **{name: first[name] for name in (*_FIRST, *RESERVED) if name in first},
        "global_batch_size": global_batch,
        "hosts": list(dict.fromkeys(r["host"] for r in own if "host" in r)),
    }


def _mean(values: Sequence[Any]) -> float | None:
    """Return the mean of the numbers among values: a rank that compressed nothing has no nmse."""
    numbers = [v for v in values if is_number(v)]
    return sum(numbers) / len(numbers) if numbers else None


def _sum(values: Sequence[Any]) -> float | None:
    return sum(values) if values and all(is_number(v) for v in values) else None
