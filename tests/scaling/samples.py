"""Synthetic studies whose truth is known, in the format that real ones have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.define.study import Case, Point, Program, Study, global_batch, plan
from qsgd_hpc.scaling.store import Attempt, StudyFolder

PARAMETERS = 421_642
STEPS = 702
EPOCHS = 3
CASE = Case("train", batch_size=128)

_PROGRAM = (
    "batch_args",
    "target",
    "script",
    "args",
    "batch_sizes",
    "epochs",
    "steps",
    "framework",
    "workload",
)


def study(**changes: Any) -> Study:
    """Return a study of one script that is right in every value, but for the changes.

    Changes that belong to a program (`script`, `batch_size`, ...) change the one there is.
    """
    values: dict[str, Any] = {
        "workdir": Path("/home/ada"),
        "mode": "strong",
        "nodes": (1, 2),
        "bits": (32, 8, 4),
        "ranks_per_node": 1,
        "site": "local",
        **changes,
    }
    script = values.setdefault("script", Path("/home/ada/train.py"))
    own = {"script": script, "workload": script.stem}
    own |= {name: values.pop(name) for name in _PROGRAM if name in values}
    if "batch_size" in values:
        own["batch_sizes"] = (values.pop("batch_size"),)
    if "programs" in values:
        return Study(**{k: v for k, v in values.items() if k != "script"})
    return Study(**{"programs": (Program(**own),), **values})


def several(**changes: Any) -> Study:
    """Return a study of two networks, two frameworks and two batches: six cases."""
    programs = (
        Program("resnet34", Path("/opt/resnet34.py"), "torch", batch_sizes=(128, 256)),
        Program("resnet34", Path("/opt/resnet34_keras.py"), "keras", batch_sizes=(128, 256)),
        Program("ptb-small", Path("/opt/ptb.py"), "torch", batch_sizes=(64, 128)),
    )
    return study(programs=programs, **changes)


def amdahl(point: Point, *, serial: float = 0.1, one_rank: float = 1000.0) -> float:
    """Throughput under Amdahl's law; bits change nothing."""
    return one_rank / (serial + (1 - serial) / point.ranks)


def gustafson(point: Point, *, serial: float = 0.1, one_rank: float = 1000.0) -> float:
    """Throughput under Gustafson's law, for weak scaling."""
    return one_rank * (point.ranks - serial * (point.ranks - 1))


def usl(
    point: Point, *, contention: float = 0.05, coherency: float = 0.01, one_rank: float = 1000.0
) -> float:
    """Throughput under the universal scalability law."""
    p = point.ranks
    return one_rank * p / (1 + contention * (p - 1) + coherency * p * (p - 1))


def wire_bytes(point: Point) -> int:
    """Bytes of all ranks in a scatter-reduce-allgather of b bits and a float32 per 512 elements."""
    per_element = 4.0 if point.bits == 32 else point.bits / 8 + 4 / 512
    return int(2 * (point.ranks - 1) * PARAMETERS * per_element) * STEPS


def attempt(point: Point, *, speed: float, number: int = 1, **changes: Any) -> Attempt:
    """Return a finished attempt of a script of the first generation: it knows images/s alone.

    `changes` replace fields of its final record.
    """
    seconds = 60_000 / speed
    final = {
        "event": "final",
        "ranks": point.ranks,
        "images_per_s": speed,
        "test_accuracy": 0.988,
        **_bytes(point),
        "comm_time_s": 0.25 * EPOCHS * seconds,
        "steps": STEPS,
        "global_batch_size": 256,
        "dataset": "mnist",
        **_origin(point),
        **changes,
    }
    epochs = [
        {"event": "epoch", "epoch": e, "seconds": seconds, "images_per_s": speed, **_origin(point)}
        for e in range(1, EPOCHS + 1)
    ]
    return Attempt(point, number, "COMPLETED", 0, (*epochs, final), 0, _provenance(point, number))


def metered(
    point: Point, *, speed: float, unit: str = "images", exposed: float = 0.2, **changes: Any
) -> Attempt:
    """Return a finished attempt whose script used the meter: parts of a step, epochs with times.

    Args:
        speed: throughput in `unit` per second; words record a perplexity, others an accuracy.
        exposed: share of a step that waits for communication, 0 on one rank.
        changes: replace fields of the final record.
    """
    batch = point.case.batch_size
    step_s = batch / speed
    waits = exposed * step_s if point.ranks > 1 else 0.0
    learnt = {e: 1 - 0.5**e / 5 for e in range(1, EPOCHS + 1)}  # 0.9, 0.95, 0.975
    column = "perplexity" if unit == "words" else "test_accuracy"
    reached = {e: 100 / q if unit == "words" else q for e, q in learnt.items()}
    epoch_s = STEPS / EPOCHS * step_s
    epochs = [
        {
            "event": "epoch",
            "epoch": e,
            "elapsed_s": e * epoch_s,
            "seconds": epoch_s,
            "throughput": speed,
            "unit": unit,
            "train_loss": 1.0 / e,
            column: reached[e],
            **_origin(point),
        }
        for e in range(1, EPOCHS + 1)
    ]
    coding_s = 0.0 if point.bits == 32 else 0.02 * step_s
    final = {
        "event": "final",
        "ranks": point.ranks,
        "throughput": speed,
        "unit": unit,
        "steps": STEPS,
        "warmup_steps": 10,
        "warmup_rule": "The first 10 steps are not timed.",
        "step_s": 0.99 * step_s,
        "step_mean_s": step_s,
        "compute_s": 0.95 * step_s - waits,
        "exposed_s": waits,
        "data_s": 0.05 * step_s,
        "hidden_s": waits / 4,
        "comm_s": 1.25 * waits,
        "coding_s": coding_s if waits else 0.0,
        "comm_time_s": 1.25 * waits * STEPS,
        "step_jitter": 0.03,
        **_bytes(point),
        "nmse": None if point.bits == 32 or not waits else 4.0**-point.bits,
        "global_batch_size": batch,
        "dataset": "ptb" if unit == "words" else "cifar10",
        column: reached[EPOCHS],
        "parameters": PARAMETERS,
        "bits": point.bits,
        "algorithm": point.case.algorithm,
        "layers": [[PARAMETERS // 2, 0.0], [PARAMETERS // 2, 0.4 * step_s]],
        "backward_s": 0.4 * step_s,
        "hosts": [f"bench-{n + 1:02d}" for n in range(point.nodes)],
        "gpu": None,
        "threads": 1,
        **_origin(point),
        **changes,
    }
    return Attempt(point, 1, "COMPLETED", 0, (*epochs, final), 0, _provenance(point, 1))


def attempts(study: Study, speed: Callable[[Point], float] = amdahl) -> list[Attempt]:
    """Return one finished attempt of the first generation for each point of a study."""
    return [attempt(point, speed=speed(point)) for point in plan(study)]


def metered_attempts(study: Study, speed: Callable[[Point], float] = amdahl) -> list[Attempt]:
    """Return one metered attempt for each point: words for ptb, images for all others."""
    return [
        metered(
            point,
            speed=speed(point),
            unit="words" if point.case.workload.startswith("ptb") else "images",
            global_batch_size=global_batch(study.mode, point.case, point.ranks),
        )
        for point in plan(study)
    ]


def engine_only(study: Study, point: Point, *, step_s: float) -> Attempt:
    """Return an attempt of a script that knows nothing of records: the engine wrote them."""
    wire, gradient = (_bytes(point)[name] for name in ("wire_bytes", "gradient_bytes"))
    records = [
        {
            "event": "engine",
            "rank": rank,
            "ranks": point.ranks,
            "steps": STEPS,
            "warmup_steps": 10,
            "step_s": step_s * (1 + rank / 100),
            "step_mean_s": 2 * step_s,  # a test between epochs is part of a step
            "exposed_s": 0.2 * step_s,
            "comm_s": 0.3 * step_s,
            "hidden_s": 0.1 * step_s,
            "coding_s": 0.02 * step_s,
            "wire_bytes": wire / point.ranks,
            "gradient_bytes": gradient / point.ranks,
            "comm_time_s": 0.3 * step_s * STEPS,
            "nmse": None,
            "layers": [[PARAMETERS, 0.0]],
            "backward_s": 0.4 * step_s,
            **_origin(point),
        }
        for rank in range(point.ranks)
    ]
    batch = global_batch(study.mode, point.case, point.ranks)
    origin = _provenance(point, 1)
    return Attempt(point, 1, "COMPLETED", 0, tuple(records), 0, origin, batch)


def written(folder: Path, study: Study, found: list[Attempt]) -> StudyFolder:
    """Store a study and its attempts as a run would."""
    target = StudyFolder(folder)
    target.create(study)
    for each in found:
        target.append(each)
    return target


def _bytes(point: Point) -> dict[str, int]:
    gradient = 4 * PARAMETERS * STEPS * point.ranks
    return {"wire_bytes": wire_bytes(point), "gradient_bytes": gradient}


def _origin(point: Point) -> dict[str, Any]:
    return {
        "time": f"2026-11-21T15:{point.repeat:02d}:00.000Z",
        "host": "bench-01",
        "pid": 4242,
        "cpu": "AMD EPYC 7543P",
        "cores": 2,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "mpi": "MPICH Version: 5.0.2",
    }


def _provenance(point: Point, number: int) -> Mapping[str, Any]:
    return {
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "script_sha256": "ab" * 32,
        "job": {"id": f"local-{number}", "site": "local", "scheduler": "local"},
        "command": ["/home/ada/train.py", "--global-batch-size", "256"],
        "env": {"QSGD_BITS": str(point.bits)},
    }
