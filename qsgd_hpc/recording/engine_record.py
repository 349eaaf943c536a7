"""The "engine" record that every rank writes at the end of a job."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from qsgd_hpc import env
from qsgd_hpc._notices import warn
from qsgd_hpc.recording import STEP_MARK
from qsgd_hpc.recording.records import record

__all__ = [
    "MOST_LAYERS",
    "mean_nmse",
    "merge_neighbours",
    "summary",
    "uncoded",
    "warmup_steps",
    "write_record",
]

MOST_LAYERS = 2000
_WARMUP = 10


def write_record(engine: Any, *, rank: int, ranks: int) -> None:
    """Append an engine's counters to the file of QSGD_RECORDS.

    Nothing is written if there was no step. This runs at the exit of a user's script, so an error
    is a warning on stderr, not an exception. It does not communicate with other ranks, which may
    have ended.

    Args:
        engine: a _core.Engine, possibly after its shutdown.
        rank: the engine's rank.
        ranks: number of ranks of the job.
    """
    try:
        profile = engine.step_profile()
        if profile["steps"] > 0:
            quality = engine.quality()
            fields = summary(profile, engine.stats(), quality, rank=rank, ranks=ranks)
            # The tuner may also choose float32, which cannot be distinguished from the planner.
            planner = ranks > 1 and not env.get("QSGD_AUTOTUNE")
            record("engine", **fields, **uncoded(quality, planner=planner))
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        warn(
            f"rank {rank} writes no 'engine' record: {text} (unset QSGD_RECORDS to disable records)"
        )


def summary(
    profile: Mapping[str, Any],
    stats: Mapping[str, float],
    quality: Mapping[str, Mapping[str, Any]],
    *,
    rank: int,
    ranks: int,
) -> dict[str, Any]:
    """Return the fields of an "engine" record.

    Args:
        profile, stats, quality: results of the engine's methods step_profile, stats and quality.
        rank: the engine's rank.
        ranks: number of ranks of the job.
    Returns:
        step_s is the median and step_mean_s the mean of the timed steps; exposed_s, comm_s,
        hidden_s and coding_s are means over them. None if no step is timed, or if the framework
        waits itself, so that the time is unknown. Layers are only on rank 0. Layers, gradient bytes
        and reductions are omitted for a single rank whose gradients bypass the engine.
    """
    warmup = warmup_steps(profile["steps"])
    marked = any(STEP_MARK in name for name, *_ in profile["layers"])
    fields: dict[str, Any] = {
        "rank": rank,
        "ranks": ranks,
        "steps": profile["steps"],
        "warmup_steps": warmup,
        **_of_timed_steps(profile, warmup, ranks),
        "wire_bytes": stats["wire_bytes"],
        "gradient_bytes": None if marked else stats["gradient_bytes"],
        "comm_time_s": stats["comm_time_s"],
        "fused_reductions": None if marked else stats["fused_reductions"],
        "nmse": mean_nmse(quality),
    }
    if rank == 0 and not marked:
        layers = [(elements, round(ready_s, 6)) for _, elements, ready_s in profile["layers"]]
        fields["layers"] = merge_neighbours(layers)
        fields["backward_s"] = layers[-1][1] if layers else None
    return fields


def warmup_steps(steps: int) -> int:
    """Return the number of untimed steps: 10, or half of a run shorter than 20."""
    return min(_WARMUP, steps // 2)


def _of_timed_steps(profile: Mapping[str, Any], warmup: int, ranks: int) -> dict[str, float | None]:
    # The last step has no end, because no step begins after it; the first steps of a long run are
    # no longer in the profile.
    dropped = profile["steps"] - 1 - len(profile["step_s"])
    first = max(0, warmup - dropped)
    steps, waits, comm, coding = (
        profile[name][first:].tolist() for name in ("step_s", "wait_s", "comm_s", "coding_s")
    )
    if not steps:
        return dict.fromkeys(_TIMED)
    comm_s = statistics.fmean(comm)
    seen = profile["waits_seen"] or ranks == 1
    exposed_s = statistics.fmean(waits) if ranks > 1 else 0.0  # one rank never waits
    hidden_s = max(0.0, comm_s - exposed_s) if ranks > 1 else 0.0
    return {
        "step_s": statistics.median(steps),
        "step_mean_s": statistics.fmean(steps),
        "exposed_s": exposed_s if seen else None,
        "comm_s": comm_s,
        "hidden_s": hidden_s if seen else None,
        "coding_s": statistics.fmean(coding),
    }


_TIMED = ("step_s", "step_mean_s", "exposed_s", "comm_s", "hidden_s", "coding_s")


def mean_nmse(quality: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the mean NMSE over all reductions of compressed tensors, or None."""
    coded = [q for q in quality.values() if q["coding"] != "none" and q["reductions"] > 0]
    reductions = sum(q["reductions"] for q in coded)
    return sum(q["mean_nmse"] * q["reductions"] for q in coded) / reductions if coded else None


def uncoded(quality: Mapping[str, Mapping[str, Any]], *, planner: bool) -> dict[str, int]:
    """Return the number of tensors for which compression was requested, and of those not coded.

    Args:
        quality: the result of the engine's method of this name.
        planner: whether the planner was active. It declines a tensor before its first coding; a
            tensor that was coded earlier became float32 for another reason, such as the error
            budget.
    """
    asked = [q for q in quality.values() if q["reductions"] > 0]
    plain = [q for q in asked if q["coding"] == "none"]
    return {
        "asked_tensors": len(asked),
        "plain_tensors": len(plain),
        "declined_tensors": sum(planner and q["mean_nmse"] == 0 for q in plain),
        "asked_elements": sum(q["elements"] for q in asked),
        "plain_elements": sum(q["elements"] for q in plain),
    }


def merge_neighbours(layers: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return [[elements, ready_s], ...], at most MOST_LAYERS, by merging neighbours.

    Elements are summed; a merged entry is ready when its last part is.
    """
    together = max(1, -(-len(layers) // MOST_LAYERS))
    merged = []
    for at in range(0, len(layers), together):
        group = layers[at : at + together]
        merged.append([sum(elements for elements, _ in group), group[-1][1]])
    return merged
