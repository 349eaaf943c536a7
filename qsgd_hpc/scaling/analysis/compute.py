"""Analysis of a study's attempts: pure functions; scaling/README.md defines every column.

A measurement becomes a row of numbers, with NaN for missing fields; a table has their medians.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.fits import fit_laws, fit_link
from qsgd_hpc.scaling.analysis.quality import NONE, Quality, cut_short, default_target, quality_of
from qsgd_hpc.scaling.analysis.results import BREAKDOWN, COLUMNS, Analysis, CaseAnalysis
from qsgd_hpc.scaling.analysis.stats import interval, ratio_interval
from qsgd_hpc.scaling.analysis.verdicts import break_even, compressed_rows
from qsgd_hpc.scaling.define.study import PLAIN_BITS, Case, counts_for, global_batch
from qsgd_hpc.scaling.store import Attempt, finished, is_number, throughput, usable

__all__ = ["COLUMNS", "Analysis", "analyse"]

_SIZE = ["nodes", "ranks", "bits"]
_CURVE = (*_SIZE, "repeat", "epoch", "elapsed_s", "train_loss", "test_accuracy", "perplexity")


def analyse(
    attempts: Iterable[Attempt],
    *,
    mode: str = "strong",
    cases: Sequence[Case] = (),
    target: float | Mapping[Case, float | None] | None = None,
    site: str = "",
) -> Analysis:
    """Reduce the finished points of a study to one table per case.

    Values of a table are medians over the repeats. Only the parts of a step are taken from the run
    with median throughput, so that they add up. See stats.py for 95 % intervals. A point of one
    rank belongs to all algorithms of its workload, framework and batch, and to all bits: one rank
    sends nothing.

    Args:
        attempts: attempts of the study, in order.
        mode: "strong" or "weak"; decides which scaling law applies.
        cases: the cases of the study, in its order; empty: all measured cases, sorted.
        target: the quality that time_to_target_s refers to, for all cases or for each case. Above 1
            it is a perplexity, else an accuracy. A case without a target, or that records the other
            kind, uses the quality that all fp32 runs at the largest size reach (quality.py).
        site: the site where it was measured, for sentences; empty if unknown.
    Returns:
        The analysis; it has no cases if no point is finished.
    """
    measured = usable(attempts)
    found = [
        (case, *_one_unit(runs))
        for case in cases or _measured_cases(measured)
        if (runs := [a for a in measured if counts_for(case, a.point)])
    ]
    targets = (
        target if isinstance(target, Mapping) else dict.fromkeys((c for c, _, _ in found), target)
    )
    bare = [_case(case, kept, targets.get(case), mode) for case, kept, _ in found]
    compared = max(1, sum(len(compressed_rows(case)) for case in bare))
    counted = [replace(case, comparisons=compared) for case in bare]
    done = tuple(replace(case, break_even=break_even(case, site)) for case in counted)
    left_out = [c for case, _, left in found for c in _left_out(case, left)]
    limits = (
        *_engine_only(measured),
        *_cut_short(measured),
        *_impossible(measured),
        *_other_batches(measured, mode),
        *_other_bits(list(finished(attempts).values())),
    )
    return Analysis(done, (*left_out, *limits))


def _measured_cases(measured: Sequence[Attempt]) -> list[Case]:
    """Return the measured cases, except one-rank cases that are shared by cases of more ranks."""
    alone = {a.point.case for a in measured if a.point.ranks == 1}
    several = {a.point.case for a in measured if a.point.ranks > 1}
    shared = {
        a.point.case
        for a in measured
        if a.point.ranks == 1 and any(counts_for(case, a.point) for case in several)
    }
    return sorted(several | (alone - shared))


def _one_unit(runs: Sequence[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
    """Split runs into those of the most frequent unit and the rest; units cannot be mixed."""
    units = [throughput(a.final)[1] for a in runs]
    common = max(dict.fromkeys(units), key=units.count)
    kept = [a for a, unit in zip(runs, units, strict=True) if unit == common]
    return kept, [a for a, unit in zip(runs, units, strict=True) if unit != common]


def _left_out(case: Case, runs: Sequence[Attempt]) -> Iterator[str]:
    if runs:
        units = ", ".join(sorted({throughput(a.final)[1] for a in runs}))
        yield (
            f"Mixed units: {len(runs)} measurement(s) of {case.label} count {units} while the "
            "others count another unit. They are not used; record the same unit in every run."
        )


def _engine_only(measured: Sequence[Attempt]) -> Iterator[str]:
    made = [a for a in measured if a.final.get("source") == "engine"]
    if made:
        yield (
            f"Engine counters: {len(made)} of {len(measured)} measurements are of scripts that "
            "write no records. Their speed is the global batch over the median step of the slowest "
            "rank; a step is the time between the gradients of two optimiser steps. Accuracy and "
            "the wait for data are unknown, and an evaluation between two steps counts as part of "
            "the first."
        )


def _cut_short(measured: Sequence[Attempt]) -> Iterator[str]:
    cut = [a for a in measured if cut_short(a)]
    if cut:
        yield (
            f"Quality: {len(cut)} of {len(measured)} measurements end after a few steps (--steps) "
            "and measure speed only. The effect of compression on accuracy or perplexity needs a "
            "complete training, so it is neither shown nor judged for these cases."
        )


def _impossible(measured: Sequence[Attempt]) -> Iterator[str]:
    """Yield a caution on qualities that cannot be, such as accuracies in per cent."""
    found = [values for a in measured if (values := impossible(a))]
    if found:
        name, value = found[0][0]
        yield (
            f"Quality: {len(found)} of {len(measured)} measurements record an impossible {name}, "
            f"such as {value:g}. It is not used. An accuracy is a share from 0 to 1, not per cent; "
            "a perplexity is at least 1."
        )


def _other_batches(measured: Sequence[Attempt], mode: str) -> Iterator[str]:
    """Yield a caution on runs with another batch than that of their study's mode."""
    known = [(a.point, number(a.final, "global_batch_size")) for a in measured if a.global_batch]
    batches = [(p, used, global_batch(mode, p.case, p.ranks)) for p, used in known if used > 0]
    other = [(point, used, planned) for point, used, planned in batches if used != planned]
    if other:
        point, used, planned = other[0]
        yield (
            f"Batch: In {len(other)} of {len(measured)} measurements the script used another "
            f"global batch than the study planned, such as {used:g} instead of {planned} "
            f"({point.label}). Sizes are not comparable then. Let the script use the batch "
            "that it is given (--batch-args)."
        )


def _other_bits(measured: Sequence[Attempt]) -> Iterator[str]:
    """Yield a caution on scripts whose own compression overrides the study's bits."""
    several = [a for a in measured if a.point.ranks > 1]
    other = [a for a in several if a.has_other_bits]
    if other:
        point, used = other[0].point, other[0].used_bits
        did = "compressed gradients" if point.bits == PLAIN_BITS else "compressed no gradient"
        if used not in (None, PLAIN_BITS):
            did = f"compressed gradients to {units.bits_name(used)}"
        yield (
            f"Bits: In {len(other)} of {len(several)} measurements on several ranks the script "
            f"{did} although the study set {units.bits_name(point.bits)} (such as {point.label}). "
            "They are not used. Bits in the script override --bits: remove its compression= or "
            "bits= (FSDP2 needs QSGD_WEIGHT_BITS, too), so that the study sets them."
        )


def _case(case: Case, measured: Sequence[Attempt], given: float | None, mode: str) -> CaseAnalysis:
    runs = _runs(measured)
    quality = NONE if any(cut_short(a) for a in measured) else quality_of(runs)
    target = given if given is not None and quality.takes(given) else default_target(runs, quality)
    runs = _runs(measured, quality, target)
    table, reference = _table_of(runs)
    datasets = sorted({str(a.final["dataset"]) for a in measured if a.final.get("dataset")})
    epochs = [row for a in measured for row in curve(a)]
    tested = runs["test_samples"].min()  # NaN if no run recorded it
    return CaseAnalysis(
        case=case,
        unit=throughput(measured[0].final)[1],
        quality=quality.column,
        target=target,
        table=table,
        runs=runs.replace([math.inf], np.nan),
        curves=_sorted(pd.DataFrame(epochs, columns=list(_CURVE)), "epoch"),
        reference=reference,
        dataset=", ".join(datasets) or None,
        fits=fit_laws(runs, mode),
        link=fit_link(runs),
        test_samples=int(tested) if tested >= 1 else None,
    )


def _runs(
    measured: Sequence[Attempt], quality: Quality | None = None, target: float | None = None
) -> pd.DataFrame:
    return _sorted(pd.DataFrame([run(a, quality or quality_of(""), target) for a in measured]))


def _sorted(frame: pd.DataFrame, *more: str) -> pd.DataFrame:
    # fp32 first at each size.
    keys = ["ranks", "bits", "nodes", "repeat", *more]
    order = [True, False, True, True, *(True for _ in more)]
    return frame.sort_values(keys, ascending=order, kind="stable").reset_index(drop=True)


# Parts of one step: medians of each would not add up.
_OF_ONE_RUN = (*BREAKDOWN, "hidden_s", "coding_s", "exposed_share", "comm_time_share")

_WORST = ("link_bits_s", "link_share")


def _table_of(runs: pd.DataFrame) -> tuple[pd.DataFrame, tuple[int, int]]:
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
    groups = runs.groupby(_SIZE, sort=False)
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
    speeds = {size: group["throughput"].to_numpy() for size, group in runs.groupby(_SIZE)}
    below = speeds[tuple(base[_SIZE])]
    table["speedup"] = table["throughput"] / base["throughput"]
    spans = [
        ratio_interval(speeds[tuple(row)], below) or (math.nan, math.nan)
        for row in table[_SIZE].itertuples(index=False)
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
    step_s = values["step_mean_s"]
    if not step_s > 0:  # not recorded: the parts of a step add up to it
        step_s = values["compute_s"] + values["exposed_s"] + values["data_s"]
    return _share(values["exposed_s"], step_s)


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
