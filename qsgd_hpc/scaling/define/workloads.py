"""The workloads of this package, by name, as in ``workload: resnet34`` of a study."""

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
        name: its name in studies, such as "ptb-medium".
        framework: "torch" or "keras".
        script: the file to start.
        args: arguments of this workload; they precede all others.
        unit: the unit of its throughput, "images" or "words".
        default_batch: default samples (words: sequences) per rank and step.
        data: a description of the data for --data or QSGD_DATA; --synthetic needs none.
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
    """Return the workloads of a framework, or of all, in the index's order."""
    return tuple(n for n, row in _index().items() if framework is None or framework in row)


def frameworks(workload: str | None = None) -> tuple[str, ...]:
    """Return the frameworks of a workload, or of all."""
    rows = list(_index().values()) if workload is None else [_index()[workload]]
    return tuple(each for each in FRAMEWORKS if any(each in row for row in rows))


def find(workload: str, framework: str = "torch") -> Workload:
    """Return a workload of this package.

    Raises:
        UsageError: there is none with this name, or not in this framework; the message lists the
            existing ones.
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
