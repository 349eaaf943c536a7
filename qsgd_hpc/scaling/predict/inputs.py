"""Input of a prediction: the profile of a training, from the raw records of a study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.study import PLAIN_BITS, Case, counts_for
from qsgd_hpc.scaling.store import Attempt, StudyFolder, is_number, throughput, usable

__all__ = ["Measured", "TrainingProfile", "measured", "training_of"]

HOW = (
    "Measure again with this version: `qsgd-hpc scale` with one of its workloads, or a script that "
    "uses qsgd_hpc.scaling.Meter, writes all that is needed."
)

Measured = Mapping[str, Any]
"""Values of a measurement, named as in the "final" record, with its point's nodes and case."""


@dataclass(frozen=True)
class TrainingProfile:
    """One rank's step and its gradients.

    Attributes:
        name: description of the training.
        compute_s: seconds of a step without communication and waiting for data.
        backward_s: seconds from the first gradient's submission to the last one's, at the end of
            compute_s.
        layers: (elements, ready_s) of each gradient in order of submission; ready_s counts from the
            first one.
        batch: samples of a rank in that step.
        unit: what throughput counts.
        data_s: seconds of waiting for data in each step.
        jitter: standard deviation of a rank's compute time divided by its mean.
        coding_s: seconds per element of coding and summing on one rank, by bits; 32: summing only.
        staged: whether compute_s includes the copies of gradients between GPU and host memory.
        buckets: whether layers are buckets of DDP, which are reduced one by one.
        ranks: number of ranks in the measurement.
        source: origin of the values, as text.
        assumptions: values assumed instead of measured, as text.
    """

    name: str
    compute_s: float
    backward_s: float
    layers: tuple[tuple[int, float], ...]
    batch: float
    unit: str = "samples"
    data_s: float = 0.0
    jitter: float = 0.0
    coding_s: Mapping[int, float] = field(default_factory=dict)
    staged: bool = True
    buckets: bool = False
    ranks: int = 1
    source: str = "given by hand"
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        if not self.compute_s > 0:
            faults.append(f"compute_s {self.compute_s!r}: expected seconds above 0")
        if not 0 <= self.backward_s <= self.compute_s:
            faults.append(
                f"backward_s {self.backward_s!r}: expected 0 to compute_s, {self.compute_s!r}"
            )
        if not self.layers or any(count < 0 or ready < 0 for count, ready in self.layers):
            faults.append("layers: expected (elements, ready_s) of one gradient or more, from 0 on")
        if not self.batch > 0:
            faults.append(f"batch {self.batch!r}: expected samples per rank and step, above 0")
        if faults:
            raise UsageError(f"training profile '{self.name}':\n" + "\n".join(faults))

    @property
    def parameters(self) -> int:
        """Elements of all gradients."""
        return sum(count for count, _ in self.layers)

    def throughput(self, speedup: float) -> float:
        """Return the samples per second of one rank that does not wait for others.

        Args:
            speedup: speed of computing relative to the measurement; input takes as long.
        """
        return self.batch / (self.compute_s / speedup + self.data_s)

    def coding_of(self, bits: int) -> tuple[float, str]:
        """Return the seconds per element at these bits, and the assumption made, "" if none."""
        if bits in self.coding_s:
            return self.coding_s[bits], ""
        coded = {b: s for b, s in self.coding_s.items() if b < 32}
        if bits < 32 and coded:
            nearest = min(coded, key=lambda b: abs(b - bits))
            return coded[nearest], f"coding with {bits} bits takes as long as with {nearest} bits"
        if bits == 32:
            return 0.0, "summing float32 gradients is hidden by their transfer"
        return 0.0, f"coding with {bits} bits takes no time, because no compressed run was measured"


def measured(folder: Path, case: str | None = None) -> tuple[list[Measured], str]:
    """Return the measurements of one case of a study, and the study's mode.

    They are those of the study's report: of each point the first attempt without fault, and the
    points of one rank and of one node that several cases share.

    Args:
        folder: folder of the study.
        case: key of the case; None if the study has only one.
    Raises:
        UsageError: no study, no finished measurement, or several cases and none chosen.
    """
    study_folder = StudyFolder(folder)
    study = study_folder.study()
    done = usable(study_folder.attempts()[0])
    own = {c.key: [_numbers(a, c) for a in done if counts_for(c, a.point)] for c in study.cases}
    cases = sorted(key for key, points in own.items() if points)
    if not cases:
        raise UsageError(f"{str(folder)!r} holds no finished measurement. Run `qsgd-hpc scale`.")
    if case is None and len(cases) > 1:
        raise UsageError(f"{str(folder)!r} holds {', '.join(cases)}: choose with --case NAME.")
    if case is not None and case not in cases:
        raise UsageError(f"--case {case!r}: {str(folder)!r} holds {', '.join(cases)}.")
    return own[case or cases[0]], study.mode


def _numbers(attempt: Attempt, case: Case) -> Measured:
    """Return the script's final record, completed with the means of the ranks' engine records."""
    engines = [r for r in attempt.records if r.get("event") == "engine"]
    found: dict[str, Any] = {}
    for name in ("step_s", "exposed_s", "comm_s", "coding_s", "backward_s"):
        values = [r[name] for r in engines if is_number(r.get(name))]
        if values:
            found[name] = sum(values) / len(values)
    if "step_s" in found and "exposed_s" in found:
        # Of the median step: the mean includes the tests between epochs.
        found["compute_s"] = found["step_s"] - found["exposed_s"]
    found["buckets"] = any(r.get("timed_by") == "torch.distributed" for r in engines)
    for engine in engines:
        if engine.get("layers"):
            found.setdefault("layers", engine["layers"])
    found.update({k: v for k, v in attempt.final.items() if v is not None})
    point = attempt.point
    speed, batch = throughput(attempt.final)[0], attempt.final.get("global_batch_size")
    if point.ranks == 1 and is_number(speed) and is_number(batch):
        # Without communication, all of a step is computation and reading.
        found.setdefault("compute_s", batch / speed)
    found["unit"] = throughput(attempt.final)[1]
    found.update(nodes=point.nodes, ranks=point.ranks, bits=point.bits, case=case)
    return found


def training_of(points: Sequence[Measured], mode: str, source: str) -> TrainingProfile:
    """Return the training profile from the measurements of the smallest size, uncompressed.

    Args:
        points: measurements of one case.
        mode: mode of the study.
        source: origin of the measurements, as text.
    Raises:
        UsageError: values are missing; the message names them and how to get them.
    """
    base = _base(points)
    first = base[0]
    compute_s = _median(base, "compute_s")
    timed = _with_gradients(points)
    missing = [] if compute_s is not None else ["compute_s"]
    missing += [] if timed is not None else ["layers and backward_s, which sizes above one rank"]
    if compute_s is None or timed is None:
        raise UsageError(
            f"{source}: the measurement with {first['ranks']} rank(s) says nothing about "
            f"{', '.join(missing)}. {HOW}"
        )
    ranks = int(first["ranks"])
    assumptions = []
    pace = 1.0
    if timed["ranks"] != ranks:
        own_s = timed.get("compute_s")
        pace = compute_s / own_s if is_number(own_s) and own_s > 0 else 1.0
        assumptions.append(
            "gradients are ready in the order, and at the shares of the computing time, measured "
            f"with {timed['ranks']} ranks, because a single rank submits none"
        )
    if ranks > 1:
        assumptions.append(
            f"computing takes as long as with {ranks} ranks, the smallest size measured, which may "
            "share a node's caches and memory"
        )
    if timed.get("buckets"):
        assumptions.append(
            "DDP reduces each of its buckets by itself: the hook's codes by direct exchange (sra), "
            "float32 by a ring"
        )
    jitter = _median(base, "step_jitter")
    if jitter is None:
        assumptions.append("all ranks take equally long to compute: no jitter was recorded")
    return TrainingProfile(
        name=first["case"].label,
        compute_s=compute_s,
        backward_s=min(pace * timed["backward_s"], compute_s),
        layers=tuple((int(count), pace * float(ready)) for count, ready in timed["layers"]),
        batch=_batch(first, mode),
        unit=first["unit"],
        data_s=_median(base, "data_s") or 0.0,
        jitter=jitter or 0.0,
        coding_s=_coding(points),
        staged=bool(first.get("gpu")),
        buckets=bool(timed.get("buckets")),
        ranks=ranks,
        source=source,
        assumptions=tuple(assumptions),
    )


def _with_gradients(points: Sequence[Measured]) -> Measured | None:
    """Return the smallest size (with the most bits) that recorded when gradients were ready."""
    timed = [p for p in points if p.get("layers") and is_number(p.get("backward_s"))]
    return min(timed, key=lambda p: (int(p["ranks"]), -int(p["bits"])), default=None)


def _base(points: Sequence[Measured]) -> list[Measured]:
    fewest = min(int(p["ranks"]) for p in points)
    small = [p for p in points if p["ranks"] == fewest]
    return [p for p in small if p["bits"] == PLAIN_BITS] or small


def _batch(point: Measured, mode: str) -> float:
    """Return the size of one rank's step in the measurement's unit: images, or words."""
    # The engine's throughput refers to the median step.
    of_engine = point.get("source") == "engine"
    speed, step_s = point.get("throughput"), point.get("step_s" if of_engine else "step_mean_s")
    if is_number(speed) and is_number(step_s):
        return speed * step_s / int(point["ranks"])
    total = point.get("global_batch_size")
    if is_number(total):
        # A script's own record counts words, but its batch sequences.
        own_s = point.get("step_s")
        known = is_number(speed) and is_number(own_s) and total > 0
        per_sample = max(1, round(speed * own_s / total)) if known else 1
        return total * per_sample / int(point["ranks"])
    size = float(point["case"].batch_size)
    return size / int(point["ranks"]) if mode == "strong" else size


def _coding(points: Sequence[Measured]) -> dict[int, float]:
    """Return seconds per element of coding and summing by bits, from sizes of several ranks."""
    found: dict[int, list[float]] = {}
    for p in points:
        elements = sum(count for count, _ in p.get("layers") or ()) or p.get("parameters")
        if p["ranks"] > 1 and is_number(p.get("coding_s")) and elements:
            found.setdefault(int(p["bits"]), []).append(p["coding_s"] / elements)
    return {bits: median(values) for bits, values in found.items()}


def _median(points: Iterable[Measured], name: str) -> float | None:
    values = [float(p[name]) for p in points if is_number(p.get(name))]
    return median(values) if values else None
