"""Measure a training's steps: their durations, and the shares of data loading and communication."""

from __future__ import annotations

import socket
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qsgd_hpc import env
from qsgd_hpc.frameworks.step_mark import leave_to_meter
from qsgd_hpc.recording.engine_record import mean_nmse, merge_neighbours, warmup_steps
from qsgd_hpc.recording.records import gpu_model, record, threads
from qsgd_hpc.rules import PLAIN_BITS

__all__ = ["Meter"]

WARMUP_RULE = "the first 10 steps, or the first half of a run shorter than 20, are not timed"

COUNTERS = {
    "wait_s": "wait_time_s",
    "comm_s": "comm_time_s",
    "coding_s": "coding_time_s",
    "wire_bytes": "wire_bytes",
    "gradient_bytes": "gradient_bytes",
    "fused_reductions": "fused_reductions",
}
"""Counters of the engine that are logged for each step."""

_PARTS = (
    "step_s", "step_mean_s", "compute_s", "exposed_s", "data_s", "hidden_s", "coding_s", "comm_s",
    "step_jitter",
)  # fmt: skip


class StepLog:
    """Per step: its duration, its wait for data, and the increase of each of COUNTERS."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in ("seconds", "data_s", *COUNTERS)}
        self._counters = [(self._columns[name], source) for name, source in COUNTERS.items()]

    def __len__(self) -> int:
        return len(self._columns["seconds"])

    def add(
        self, step_s: float, data_s: float, before: Mapping[str, float], after: Mapping[str, float]
    ) -> None:
        """Add a step: its seconds, its seconds of waiting for data, the counters around it."""
        for values, source in self._counters:
            values.append(after[source] - before[source])
        self._columns["data_s"].append(data_s)
        self._columns["seconds"].append(step_s)

    def column(self, name: str, first: int = 0) -> array[float]:
        """Return one number for each step, beginning with step ``first``."""
        return self._columns[name][first:]

    def total(self, name: str, first: int = 0) -> float:
        """Return the sum over the steps, beginning with step ``first``."""
        return sum(self.column(name, first))


@dataclass(frozen=True)
class Waits:
    """The data from which the exposed communication of steps is computed.

    Attributes:
        ranks: number of ranks; with 1, nothing is exposed.
        seen: whether a thread of the program waits for gradients, so that the engine measures it.
        compute_s: seconds of steps without communication, if ``seen`` is False: exposed is then a
            step's duration minus their mean and its wait for data.
    """

    ranks: int
    seen: bool = True
    compute_s: Sequence[float] = ()

    def exposed(self, log: StepLog, first: int) -> list[float] | None:
        """Return the exposed seconds of each step, beginning with ``first``; None if unknown.

        Computed from the mean of ``compute_s``, they may be negative for a single step.
        """
        if self.ranks == 1:
            return [0.0] * (len(log) - first)
        if self.compute_s:
            alone = statistics.fmean(self.compute_s)
            pairs = zip(log.column("seconds", first), log.column("data_s", first), strict=True)
            return [step_s - data_s - alone for step_s, data_s in pairs]
        return list(log.column("wait_s", first)) if self.seen else None

    def raw(self, log: StepLog, first: int) -> dict[str, list[float] | None]:
        """Return the seconds of every step, beginning with ``first``, to 6 digits."""
        names = ("seconds", "data_s", "comm_s", "coding_s")
        columns = {name: _six_digits(log.column(name, first)) for name in names}
        exposed = self.exposed(log, first)
        return {**columns, "exposed_s": None if exposed is None else _six_digits(exposed)}


def breakdown(log: StepLog, waits: Waits) -> dict[str, float | None]:
    """Return means per timed step; compute, exposed and data add up to the step.

    Returns:
        step_s (the median), step_mean_s, compute_s, exposed_s, data_s, hidden_s (communication
        that overlapped with computing), coding_s, comm_s, and step_jitter: the standard deviation
        of the computing time, over its mean. None if there was no step, and for values that depend
        on waits if these are unknown.
    """
    first = warmup_steps(len(log))
    parts: dict[str, float | None] = dict.fromkeys(_PARTS)
    if len(log) == 0:
        return parts
    steps, data = log.column("seconds", first), log.column("data_s", first)
    step_mean_s, data_s = statistics.fmean(steps), statistics.fmean(data)
    comm_s = statistics.fmean(log.column("comm_s", first))
    parts |= {
        "step_s": statistics.median(steps),
        "step_mean_s": step_mean_s,
        "data_s": data_s,
        "coding_s": statistics.fmean(log.column("coding_s", first)),
        "comm_s": comm_s,
    }
    exposed = waits.exposed(log, first)
    if exposed is None:
        return parts
    # Steps measured without communication may have been longer than those of the training.
    exposed_s = max(0.0, statistics.fmean(exposed))
    alone = waits.compute_s if waits.ranks > 1 else ()
    computing = alone or [s - d - e for s, d, e in zip(steps, data, exposed, strict=True)]
    return parts | {
        "compute_s": step_mean_s - data_s - exposed_s,
        "exposed_s": exposed_s,
        "hidden_s": max(0.0, comm_s - exposed_s) if waits.ranks > 1 else 0.0,
        "step_jitter": _spread(computing),
    }


def mean_over_ranks(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number over the ranks that have one; None if none has."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).extend([] if value is None else [float(value)])
    return {name: statistics.fmean(each) if each else None for name, each in found.items()}


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over the mean; 0 if there are too few values."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0


def _six_digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


Batch = TypeVar("Batch")


class Meter:
    """A timer of training steps on every rank, which writes the records of a scaling study.

    ::

        meter = Meter(hvd, global_batch_size=256, unit="images", test_samples=10000)
        for epoch in range(epochs):
            for x, y in meter.steps(loader):
                ...  # forward, backward, optimizer.step()
            meter.epoch(train_loss=loss, test_accuracy=evaluate())
        meter.final()

    A step lasts from one request for a batch to the next. Its data wait is the time until the
    loader returns the batch; its exposed communication is the time that the rank was blocked
    waiting for gradients. Code between the loops, such as evaluation, is not timed. ``epoch`` and
    ``final`` return the same numbers whether or not QSGD_RECORDS is set.

    Args:
        hvd: the module that the script trains with, such as ``qsgd_hpc.torch``; initialised.
        global_batch_size: samples per step of all ranks together; a short last batch counts as a
            full one. None if unknown: speeds are then in steps per second.
        unit: the unit of throughput: "images", "words", "samples".
        dataset: the name of the data set.
        test_samples: number of samples of all ranks together from which accuracies are computed;
            without it, a study cannot test whether differences of accuracies are significant.
        units_per_sample: units in one sample, such as the words of a sequence.
    """

    def __init__(
        self,
        hvd: Any,
        *,
        global_batch_size: int | None = None,
        unit: str = "samples",
        dataset: str | None = None,
        test_samples: int | None = None,
        units_per_sample: int = 1,
    ) -> None:
        leave_to_meter()
        self._hvd = hvd
        self._global_batch_size = global_batch_size
        self._unit = unit if global_batch_size else "steps"
        self._units_per_step = (global_batch_size or 1) * units_per_sample
        self._data = {"dataset": dataset, "test_samples": test_samples}
        self._log = StepLog()
        self._epoch = 0
        self._first_step = 0  # of this epoch
        self._elapsed_s = 0.0
        self._compute_s: list[float] = []
        self._last: dict[str, Any] = {}

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, and time the caller's work on each.

        A loop that ends with ``break`` or by an error does not count its last step; to end early,
        pass ``itertools.islice(loader, steps)``.
        """
        add, counters, clock = self._log.add, self._hvd.communication_stats, time.perf_counter
        before, begin = counters(), clock()
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            got = clock()
            yield batch
            after, end = counters(), clock()
            add(end - begin, got - begin, before, after)
            before, begin = after, end

    def compute_only(self, seconds: float | Sequence[float]) -> None:
        """Set the duration of a step without communication, measured on this rank.

        For frameworks in which no thread of the program is blocked while gradients are in flight,
        such as TensorFlow's graphs: exposed communication is then a step's duration minus this and
        its data wait.

        Args:
            seconds: duration of one step, or of each of several.
        """
        self._compute_s = list(seconds) if isinstance(seconds, Sequence) else [float(seconds)]

    def epoch(self, **results: Any) -> dict[str, Any]:
        """End an epoch; every rank must call this. Rank 0 writes the record; all ranks return it.

        Args:
            results: numbers such as train_loss, test_accuracy (0..1) or perplexity; the mean over
                the ranks is recorded, so each rank may pass the results of its own share.
        """
        steps = len(self._log) - self._first_step
        mine = {"seconds": self._log.total("seconds", self._first_step), **_numbers(results)}
        rows = self._gather(mine)
        means = mean_over_ranks(rows)
        self._epoch += 1
        self._elapsed_s += means["seconds"]
        self._last = {name: means[name] for name in results}
        units = steps * self._units_per_step
        entry = {
            "epoch": self._epoch,
            "elapsed_s": self._elapsed_s,
            "seconds": means["seconds"],
            "throughput": units / means["seconds"] if means["seconds"] else None,
            "unit": self._unit,
            **self._last,
        }
        if self._hvd.rank() == 0:
            record("epoch", **entry)
            self._record_steps()
        self._first_step = len(self._log)
        return entry

    def final(self, **results: Any) -> dict[str, Any]:
        """End the training; every rank must call this. Rank 0 writes the record; all return it.

        Args:
            results: numbers as for ``epoch``; default: those of the last epoch. Also texts and
                integers, such as the number of parameters, of which rank 0's are recorded.
        """
        if self._hvd.rank() == 0 and self._first_step < len(self._log):
            self._record_steps()
        self._first_step = len(self._log)
        rows = self._gather(
            {
                "parts": breakdown(self._log, self._waits()),
                "means": {
                    "comm_time_s": self._log.total("comm_s"),
                    "fused_reductions": self._log.total("fused_reductions"),
                    "nmse": mean_nmse(self._hvd.compression_stats()),
                    **_numbers({k: v for k, v in results.items() if not _is_fact(v)}),
                },
                "wire_bytes": int(self._log.total("wire_bytes")),
                "gradient_bytes": int(self._log.total("gradient_bytes")),
                "host": socket.gethostname(),
            }
        )
        parts = mean_over_ranks(row["parts"] for row in rows)
        step_s = parts["step_mean_s"]
        entry = {
            **self._facts(),
            "hosts": list(dict.fromkeys(row["host"] for row in rows)),
            "throughput": self._units_per_step / step_s if step_s else None,
            **parts,
            **{k: sum(row[k] for row in rows) for k in ("wire_bytes", "gradient_bytes")},
            **self._last,
            **results,
            **mean_over_ranks(row["means"] for row in rows),
        }
        if self._hvd.rank() == 0:
            record("final", **entry)
        return entry

    def _gather(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        from qsgd_hpc.runtime import objects  # imports the engine, which a login node may lack

        rows: list[dict[str, Any]] = objects.allgather_object(dict(mine), name="scaling.meter")
        return rows

    def _waits(self) -> Waits:
        from qsgd_hpc.runtime import basics

        seen = basics.step_profile()["waits_seen"]
        return Waits(self._hvd.size(), seen, self._compute_s)

    def _record_steps(self) -> None:
        raw = self._waits().raw(self._log, self._first_step)
        record("steps", first_step=self._first_step, **raw)

    def _facts(self) -> dict[str, Any]:
        """Return the entries that are equal on all ranks, or of which this rank's are recorded."""
        from qsgd_hpc.runtime import basics

        profile = basics.step_profile()
        layers = [(elements, round(ready_s, 6)) for _, elements, ready_s in profile["layers"]]
        alone = self._compute_s
        return {
            "ranks": self._hvd.size(),
            "unit": self._unit,
            "steps": len(self._log),
            "warmup_steps": warmup_steps(len(self._log)),
            "warmup_rule": WARMUP_RULE,
            "global_batch_size": self._global_batch_size,
            **self._data,
            "bits": _bits(self._hvd.compression_stats()),
            "algorithm": env.get("QSGD_ALGORITHM"),
            "compute_only_s": sum(alone) / len(alone) if alone else None,
            "layers": merge_neighbours(layers),
            "backward_s": profile["backward_s"],
            "gpu": gpu_model(),
            "threads": threads(),
        }


def _is_fact(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, bool, list, tuple, dict))


def _numbers(results: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if value is None else float(value) for name, value in results.items()}


def _bits(tensors: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the bits with which most elements of compressed gradients are sent; 32 if none is."""
    elements: dict[float, int] = {}
    coded = [t for t in tensors.values() if t["coding"] != "none" and t["reductions"]]
    for each in coded:
        elements[each["bits"]] = elements.get(each["bits"], 0) + each["elements"]
    most = max(elements, key=lambda bits: elements[bits], default=float(PLAIN_BITS))
    return int(most) if most == int(most) else most
