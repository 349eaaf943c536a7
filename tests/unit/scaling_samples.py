"""Synthetic studies whose truth is known, in the format that real ones have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.attempts import Attempt
from qsgd_hpc.scaling.folder import StudyFolder
from qsgd_hpc.scaling.plan import Point, plan
from qsgd_hpc.scaling.study import Study

PARAMETERS = 421_642
STEPS = 702


def study(**changes: Any) -> Study:
    """Return a study that is right in every value, but for the changes."""
    values: dict[str, Any] = {
        "script": Path("/home/ada/train.py"),
        "workdir": Path("/home/ada"),
        "mode": "strong",
        "nodes": (1, 2),
        "bits": (32, 8, 4),
        "ranks_per_node": 1,
        "site": "local",
        **changes,
    }
    return Study(**values)


def amdahl(point: Point, *, serial: float = 0.1, one_rank: float = 1000.0) -> float:
    """Images/s under Amdahl's law; bits change nothing."""
    return one_rank / (serial + (1 - serial) / point.ranks)


def wire_bytes(point: Point) -> int:
    """Bytes of all ranks in a scatter-reduce-allgather of b bits and a float32 per 512 elements."""
    per_element = 4.0 if point.bits == 32 else point.bits / 8 + 4 / 512
    return int(2 * (point.ranks - 1) * PARAMETERS * per_element) * STEPS


def attempt(point: Point, *, speed: float, number: int = 1, **changes: Any) -> Attempt:
    """Return a finished attempt; `changes` replace fields of its final record."""
    origin = {
        "time": f"2026-11-21T15:{point.repeat:02d}:00.000Z",
        "host": "bench-01",
        "pid": 4242,
        "cpu": "AMD EPYC 7543P",
        "cores": 2,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "mpi": "MPICH Version: 5.0.2",
    }
    seconds = 60_000 / speed
    final = {
        "event": "final",
        "ranks": point.ranks,
        "images_per_s": speed,
        "test_accuracy": 0.988,
        "wire_bytes": wire_bytes(point),
        "gradient_bytes": 4 * PARAMETERS * STEPS * point.ranks,
        "comm_time_s": 0.25 * 3 * seconds,
        "steps": STEPS,
        "global_batch_size": 256,
        "dataset": "mnist",
        **origin,
        **changes,
    }
    epochs = [
        {"event": "epoch", "epoch": e, "seconds": seconds, "images_per_s": speed, **origin}
        for e in (1, 2, 3)
    ]
    provenance = {
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "script_sha256": "ab" * 32,
        "job": {"id": f"local-{number}", "site": "local", "scheduler": "local"},
        "command": ["/home/ada/train.py", "--global-batch-size", "256"],
        "env": {"QSGD_BITS": str(point.bits)},
    }
    return Attempt(point, number, "COMPLETED", 0, (*epochs, final), 0, provenance)


def attempts(study: Study, speed: Callable[[Point], float] = amdahl) -> list[Attempt]:
    """Return one finished attempt for each point of a study."""
    return [attempt(point, speed=speed(point)) for point in plan(study)]


def written(folder: Path, study: Study, found: list[Attempt]) -> StudyFolder:
    """Store a study and its attempts as a run would."""
    target = StudyFolder(folder)
    target.create(study)
    for each in found:
        target.append(each)
    return target
