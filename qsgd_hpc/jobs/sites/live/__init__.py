"""A scheduler's answers about its machine: queues, nodes, limits.

Values that it does not report are None or empty.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.schedulers.command import ask

__all__ = ["ASKED", "Live", "LiveQueue", "answer_of", "look", "number_of", "together", "tried"]

T = TypeVar("T")

# The schedulers that can be queried, and a command of each that exists where it is installed.
ASKED = {"pbs": "qstat", "slurm": "scontrol"}


@dataclass(frozen=True)
class LiveQueue:
    """One queue, partition or QOS.

    Attributes:
        nodes: least and most nodes of a job; None if there is no such limit.
        walltime_min: least and most walltime in minutes; None if there is no such limit.
        routes: queues to which it routes its jobs.
        route_only: whether it accepts jobs from other queues only.
        is_open: whether every user may submit to it now.
        total_nodes: its number of nodes.
        cpus: numbers of CPUs per node that occur, each once.
        gpus: numbers of GPUs per node that occur, each once.
    """

    name: str
    nodes: tuple[int | None, int | None] = (None, None)
    walltime_min: tuple[float | None, float | None] = (None, None)
    routes: tuple[str, ...] = ()
    route_only: bool = False
    is_open: bool = True
    total_nodes: int | None = None
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Live:
    """One machine. ``unanswered``: a sentence for each query without an answer."""

    scheduler: str
    queues: Mapping[str, LiveQueue] = field(default_factory=dict)
    qos: Mapping[str, LiveQueue] = field(default_factory=dict)
    nodes: int | None = None
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    filesystems: tuple[str, ...] = ()
    default_queue: str | None = None
    unanswered: tuple[str, ...] = ()


def together(numbers: Iterable[int | None]) -> tuple[int, ...]:
    """Return the known numbers, each once, in ascending order."""
    return tuple(sorted({number for number in numbers if number is not None}))


def number_of(value: object) -> int | None:
    """Return an integer that is written as such; all other words, such as UNLIMITED, are None."""
    text = str(value)
    return int(text) if text.isdigit() else None


def answer_of(argv: Sequence[str]) -> str:
    """Return the output of a command.

    Raises:
        LaunchError: the command failed; the message has its error.
    """
    answer = ask(argv)
    if answer.code != 0:
        said = " ".join((answer.err or answer.out).split()) or f"exit code {answer.code}"
        raise LaunchError(f"`{' '.join(argv)}` gave no answer: {said}")
    return answer.out


def tried(query: Callable[[], T], otherwise: T, unanswered: list[str]) -> T:
    """Return the result of a query; if it has no answer, another value, and record the error."""
    try:
        return query()
    except LaunchError as error:
        unanswered.append(str(error))
        return otherwise


def look(scheduler: str) -> Live:
    """Query a scheduler of :data:`ASKED` about its machine.

    Raises:
        LaunchError: it does not answer, or its answer cannot be parsed.
    """
    return cast(Live, importlib.import_module(f"{__name__}.{scheduler}").look())
