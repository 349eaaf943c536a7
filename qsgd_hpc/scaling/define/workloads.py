"""Trainings that come with this package, by name: what ``workload: resnet34`` in a study means."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.words import did_you_mean, listing

__all__ = ["FRAMEWORKS", "Workload", "find", "frameworks", "names"]

FRAMEWORKS = ("torch", "keras")


@dataclass(frozen=True)
class Workload:
    """A script that trains one network in one framework.

    Attributes:
        name: as studies call it, such as "ptb-medium".
        framework: "torch" or "keras".
        script: the file to start; its siblings hold what scripts share.
        args: arguments that the name stands for; they come before all others.
        unit: what its throughput counts, "images" or "words".
        default_batch: samples (words: sequences) of one rank's step where nothing else is said.
        data: what --data or QSGD_DATA is to hold, in words; --synthetic needs nothing.
    """

    name: str
    framework: str
    script: Path
    args: tuple[str, ...]
    unit: str
    default_batch: int
    data: str


@cache
def _index() -> dict[str, dict[str, Any]]:
    text = data("scaling").joinpath("workloads", "index.yaml").read_text(encoding="utf-8")
    index: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return index


def names(framework: str | None = None) -> tuple[str, ...]:
    """Return the workloads that there are, in that framework or in any, in the index's order."""
    return tuple(n for n, row in _index().items() if framework is None or framework in row)


def frameworks(workload: str | None = None) -> tuple[str, ...]:
    """Return the frameworks in which there is that workload, or any."""
    rows = list(_index().values()) if workload is None else [_index()[workload]]
    return tuple(each for each in FRAMEWORKS if any(each in row for row in rows))


def find(workload: str, framework: str = "torch") -> Workload:
    """Return a workload of this package.

    Raises:
        UsageError: there is none of this name, or not in this framework; the message lists those
            that there are.
    """
    row = _index().get(workload)
    if row is None:
        raise UsageError(
            f"workload {workload!r}: unknown. {did_you_mean(workload, names())} Workloads: "
            f"{', '.join(names())}; for your own script, give its path."
        )
    if framework not in frameworks(workload):
        known = framework in FRAMEWORKS
        there = f"Workloads for {framework}: {', '.join(names(framework))}." if known else ""
        raise UsageError(
            f"workload {workload!r}: not for framework {framework!r}, only for "
            f"{listing(frameworks(workload), 'and')}. {there}".strip()
        )
    file, *args = shlex.split(row[framework])
    script = data("scaling").joinpath("workloads", *file.split("/"))
    return Workload(
        name=workload,
        framework=framework,
        script=Path(str(script)),
        args=tuple(args),
        unit=row["unit"],
        default_batch=row["batch"],
        data=row["data"],
    )
