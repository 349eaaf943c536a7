"""The measurements of one run: its records as numbers, NaN for missing fields; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from qsgd_hpc.scaling.analysis.quality import Quality
from qsgd_hpc.scaling.store.attempts import Attempt, is_number, throughput

__all__ = ["UNCODED", "curve", "impossible", "number", "run"]

NAN = float("nan")

AS_RECORDED = (
    *("step_s", "step_mean_s", "compute_s", "exposed_s", "data_s", "hidden_s", "coding_s"),
    *("test_accuracy", "perplexity", "steps", "global_batch_size", "step_jitter", "test_samples"),
)
"""Fields of a "final" record that become columns unchanged."""

UNCODED = (
    *("asked_tensors", "plain_tensors", "declined_tensors"),
    *("asked_elements", "plain_elements"),
)
"""Fields of an "engine" record that become columns unchanged; the same on every rank."""


_POSSIBLE = {"test_accuracy": (0.0, 1.0), "perplexity": (1.0, math.inf)}
"""Bounds of the qualities: an accuracy above 1 is one in per cent."""


def run(attempt: Attempt, quality: Quality, target: float | None) -> dict[str, Any]:
    """Return one measurement as a row of a case's runs; scaling/README.md defines its columns."""
    final, point = attempt.final, attempt.point
    values = {name: number(final, name) for name in AS_RECORDED}
    wire, gradient = number(final, "wire_bytes"), number(final, "gradient_bytes")
    speed, _ = throughput(final)
    comm_s, link_bits_s = _comm_seconds(final), _link_bits_s(attempt)
    uncoded = next(iter(attempt.engines.values()), {})
    return {
        "nodes": point.nodes,
        "ranks": point.ranks,
        "bits": point.bits,
        "repeat": point.repeat,
        "throughput": float(speed),
        **values,
        "nmse": _nmse(attempt),
        **{name: number(uncoded, name) for name in UNCODED},
        "comm_s": comm_s,
        "exposed_share": _exposed_share(final, values),
        "comm_time_share": _comm_share(attempt, comm_s, values["step_mean_s"]),
        "wire_bytes_total": wire,
        "wire_bytes_per_step": _share(wire, values["steps"]),
        "gradient_bytes_per_step": _share(gradient, values["steps"]),
        "reductions_per_step": _share(number(final, "fused_reductions"), values["steps"]),
        "train_loss": _last_loss(attempt),
        "time_to_target_s": time_to_target(attempt, quality, target),
        "link_bits_s": link_bits_s,
        "link_share": _share(link_bits_s, number(attempt.network, "rate_bits_s")),
    }


def curve(attempt: Attempt) -> list[dict[str, Any]]:
    """Return one row per recorded epoch, for the curves over time."""
    point = attempt.point
    where = {"nodes": point.nodes, "ranks": point.ranks, "bits": point.bits, "repeat": point.repeat}
    names = ("epoch", "elapsed_s", "train_loss", "test_accuracy", "perplexity")
    return [
        {**where, **{n: number({"epoch": place, **epoch}, n) for n in names}}
        for place, epoch in enumerate(attempt.epochs, 1)
    ]


def time_to_target(attempt: Attempt, quality: Quality, target: float | None) -> float:
    """Return the time at the end of the first epoch that reaches a target, in seconds.

    Infinite if epochs recorded their quality and none reached the target, or all of them recorded
    NaN or infinity; NaN without a target, or if no epoch recorded both quality and time. Nothing
    is interpolated, because there are no measurements between epochs.
    """
    if target is None:
        return NAN
    epochs = [(number(e, quality.column), number(e, "elapsed_s")) for e in attempt.epochs]
    epochs = [(value, at) for value, at in epochs if not math.isnan(value + at)]
    if not epochs:
        diverged = any(quality.column in (e.get("nonfinite") or ()) for e in attempt.epochs)
        return math.inf if diverged else NAN
    return next((at for value, at in epochs if quality.reaches(value, target)), math.inf)


def _nmse(attempt: Attempt) -> float:
    """Return the error of quantization, from the script's meter or from the engines."""
    errors = [number(record, "nmse") for record in (attempt.final, *attempt.engines.values())]
    if errors[0] == errors[0]:
        return errors[0]
    return statistics.fmean(known) if (known := [n for n in errors if n == n]) else NAN


def _link_bits_s(attempt: Attempt) -> float:
    """Return the measured rate of the slowest emulated link, in bits per second.

    The lower of the rates before and after the run; NaN if the network was not emulated.
    """
    network = attempt.network
    rates = [
        rate
        for when in ("before", "after")
        for rate in network.get(f"reached_{when}_bits_s") or ()
        if is_number(rate)
    ]
    return float(min(rates)) if rates else NAN


def number(record: Mapping[str, Any], name: str) -> float:
    """Return a field as a float; NaN if it is missing, no number, or no possible quality."""
    value = record.get(name)
    return float(value) if is_number(value) and _possible(name, value) else NAN


def impossible(attempt: Attempt) -> list[tuple[str, float]]:
    """Return the names and values of recorded qualities that are outside of their bounds."""
    return [
        (name, value)
        for record in (*attempt.epochs, attempt.final)
        for name in _POSSIBLE
        if is_number(value := record.get(name)) and not _possible(name, value)
    ]


def _possible(name: str, value: float) -> bool:
    low, high = _POSSIBLE.get(name, (-math.inf, math.inf))
    return low <= value <= high


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else NAN


def _exposed_share(final: Mapping[str, Any], values: Mapping[str, float]) -> float:
    """Return the share of a step in which a rank waits for communication.

    The engine's mean step includes the tests between epochs, so its median counts, as for speeds.
    """
    if final.get("source") == "engine":
        return min(_share(values["exposed_s"], values["step_s"]), 1.0)  # keeps NaN, the first
    return _share(values["exposed_s"], _step_seconds(values))


def _step_seconds(values: Mapping[str, float]) -> float:
    """Return the mean seconds of a step: as recorded, or the sum of its parts, which equals it."""
    if values["step_mean_s"] > 0:
        return values["step_mean_s"]
    return values["compute_s"] + values["exposed_s"] + values["data_s"]


def _comm_seconds(final: Mapping[str, Any]) -> float:
    """Return seconds in collectives per step: of the timed steps if recorded, else of all steps."""
    timed = number(final, "comm_s")
    return _share(number(final, "comm_time_s"), number(final, "steps")) if timed != timed else timed


def _comm_share(attempt: Attempt, comm_s: float, step_mean_s: float) -> float:
    final = attempt.final
    if is_number(final.get("comm_s")) and step_mean_s > 0:
        return comm_s / step_mean_s
    total = number(final, "seconds")
    if math.isnan(total):
        total = sum(number(epoch, "seconds") for epoch in attempt.epochs)
    return _share(number(final, "comm_time_s"), total)


def _last_loss(attempt: Attempt) -> float:
    losses = [number(record, "train_loss") for record in (*attempt.epochs, attempt.final)]
    return next((loss for loss in reversed(losses) if not math.isnan(loss)), NAN)
