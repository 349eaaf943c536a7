"""Measure a training's steps: their durations, and the shares of data loading and communication."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from qsgd_hpc import env
from qsgd_hpc.frameworks.step_log import WARMUP_RULE, StepLog, Waits, breakdown, mean_over_ranks
from qsgd_hpc.frameworks.step_mark import leave_to_meter
from qsgd_hpc.recording.engine_record import mean_nmse, merge_neighbours, warmup_steps
from qsgd_hpc.recording.records import gpu_model, record, threads
from qsgd_hpc.rules import PLAIN_BITS

__all__ = ["Meter"]

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
