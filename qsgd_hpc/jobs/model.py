"""The model of a job: its request, its state and progress, and its record as a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.options import wants_torchrun

__all__ = ["Job", "JobRequest", "JobState", "Progress", "dependency"]


class JobState(str, Enum):
    """The states of a job.

    QUEUED, RUNNING (also while suspended), and seven ends: COMPLETED, STOPPED, FAILED, CANCELLED,
    TIMEOUT (at the walltime), NODE_FAIL and LOST.

    STOPPED: the training stopped at a checkpoint (exit code 85). The next part of its chain
    continues it, or ``resubmit``. NODE_FAIL: a node of the job died; ``resubmit`` continues
    without that node.

    LOST is provisional: no process runs the job, or its scheduler does not know it. A later answer
    of the scheduler corrects it; the other ends are final.
    """

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    LOST = "LOST"

    @property
    def ended(self) -> bool:
        """Return whether the job has ended."""
        return self not in (JobState.QUEUED, JobState.RUNNING)

    @property
    def final(self) -> bool:
        """Return whether the job has ended, and no later answer can change the state."""
        return self.ended and self is not JobState.LOST


def _are_strings(value: Any) -> bool:
    return type(value) in (tuple, list) and all(isinstance(word, str) for word in value)


# For the types of a request's fields: whether a value is of this type, and what to write.
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a string"),
    "Path": (lambda value: isinstance(value, Path), "a pathlib.Path"),
    "int": (lambda value: type(value) is int, "an integer"),
    "float": (
        lambda value: type(value) in (int, float) and math.isfinite(value),
        "a finite number",
    ),
    "tuple[str, ...]": (_are_strings, "a tuple of strings, also for one: ('a',)"),
    "Mapping[str, str]": (
        lambda value: _are_strings([*value, *value.values()]),
        "a dict of strings",
    ),
    "Mapping[str, tuple[str, ...]]": (
        lambda value: all(map(_are_strings, value.values())),
        "a dict of tuples of strings, such as {'lr': ('0.1', '0.2')}",
    ),
}


@dataclass(frozen=True)
class JobRequest:
    """The user's request. ``None`` and empty tuples leave the choice to the site's profile.

    Attributes:
        script: the program; a ``.py`` file is run by ``python``, any other file is executed.
        script_args: the script's arguments.
        nodes: nodes of the machine; on the local site, groups of ranks.
        ranks_per_node: None: the profile's value, else one per GPU, else one.
        network: on the local site, an emulated network of hosts, one for each node, with links of
            a rate such as "1gbit"; "none": the nodes share memory. None: the profile's value.
        walltime_min: limit in minutes; None: the profile's default, or none.
        env: variables for every rank.
        horovod: let ``import horovod`` in the script mean this package.
        torchrun: set torchrun's variables for each rank (RANK, MASTER_ADDR, ...); None: set them
            unless ``horovod`` is true.
        python: interpreter on the nodes; None: that of ``venv`` or ``conda``, else the profile's,
            else this one.
        workdir: where the job runs; None: the current directory.
        modules: environment modules that the job loads, after the profile's own setup.
        conda: conda environment (name or folder) that it activates.
        venv: virtual environment (folder) that it activates.
        gpu_view: ``all``: a rank sees every GPU of its node, its own first by ``local_rank``;
            ``one``: only its own. None: the profile's value.
        without: libraries of the profile (nccl, rccl, ccl) whose settings the job omits.
        array: values of script options; one task for each combination.
        at_once: tasks of an array that may run at the same time; None: no limit.
        after: ids of jobs that must complete before this one starts; ``any:ID``: that must end.
        chain: number of jobs to submit in sequence, each of which continues the training.
        requeue: let the scheduler start the job again after a failed node, or when it ends with
            exit code 85.
        stop_before_min: minutes before the walltime at which ``should_stop()`` becomes true.
        exclude: nodes that the job must not use.
        extra: directive lines in the scheduler's syntax, such as ``#PBS -l place=free``.
        template: a Jinja2 template to use instead of the scheduler's.
        alone: the script is a program that starts ranks itself: it runs once, on the first node.
        key: idempotency key: a second submission with the same key returns the first job.
    """

    script: Path
    script_args: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int | None = None
    network: str | None = None
    walltime_min: float | None = None
    queue: str | None = None
    account: str | None = None
    filesystems: tuple[str, ...] = ()
    site: str | None = None
    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    horovod: bool = False
    torchrun: bool | None = None
    python: str | None = None
    workdir: Path | None = None
    modules: tuple[str, ...] = ()
    conda: str | None = None
    venv: Path | None = None
    gpu_view: str | None = None
    without: tuple[str, ...] = ()
    array: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    at_once: int | None = None
    after: tuple[str, ...] = ()
    chain: int = 1
    requeue: bool = False
    stop_before_min: float | None = None
    exclude: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    template: Path | None = None
    alone: bool = False
    key: str | None = None

    def __post_init__(self) -> None:
        """Check the types: a string in place of a tuple would be one word for each letter.

        Raises:
            UsageError: a value has another type.
        """
        for each in fields(self):
            value, name = getattr(self, each.name), str(each.type).removesuffix(" | None")
            is_valid, kind = _TYPES.get(name, (None, ""))
            if is_valid and value is not None and not is_valid(value):
                raise UsageError(f"JobRequest: {each.name} is {value!r}. Use {kind}.")

    @property
    def tasks(self) -> tuple[tuple[str, ...], ...]:
        """The script options of each task of the array, in the order of their indices."""
        choices = [[(f"--{k}", value) for value in values] for k, values in self.array.items()]
        return tuple(sum(pick, ()) for pick in itertools.product(*choices)) if choices else ()

    @property
    def sets_torchrun(self) -> bool:
        """Whether torchrun's variables are set for the ranks."""
        return wants_torchrun(self.torchrun, self.horovod)

    @property
    def is_python(self) -> bool:
        """Whether Python runs the script; otherwise it is executed directly."""
        return self.script.suffix == ".py" or self.python is not None

    def interpreter(self, of_site: str | None, own: str) -> str:
        """Return the Python of the script: a path, or a name on the job's PATH.

        Args:
            of_site: that of the site's profile, if it has one.
            own: the path of this one, which a job uses that activates no environment.
        """
        if self.python is None and (self.venv or self.conda):
            # Activating it puts its Python first on PATH.
            return of_site if of_site and "/" not in of_site else "python"
        return self.python or of_site or own

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * (self.ranks_per_node or 1)


def dependency(word: str) -> tuple[Literal["ok", "any"], str]:
    """Return (kind, job id) of a word of ``after``.

    ``any``: the job only has to end; ``ok``: it must complete.
    """
    kind, _, job_id = word.rpartition(":")
    return ("any", job_id) if kind == "any" else ("ok", word)


@dataclass(frozen=True)
class Progress:
    """The progress of a job: the content of its state file.

    Attributes:
        state: the last known state.
        exit_code: of the script; None before its end, or when a signal or the site ended it.
        why: the reason for the state, from the scheduler or from this package.
        started_at: seconds since the epoch.
        ended_at: seconds since the epoch.
        scheduler_id: the job's id in the scheduler.
        tasks: number of tasks of an array in each state: ``{"RUNNING": 2, "COMPLETED": 4}``.
        bad_nodes: nodes whose failure ended the job.
        restarts: how often the scheduler started it again.
        pid: process group of a running local job.
        identity: identity of that group's leader (see ``processes.identity``), because numbers of
            processes are reused.
        silence: why the scheduler did not answer; the other values are then the last known ones.
            Never recorded: an unanswered query changes nothing.
    """

    state: JobState = JobState.QUEUED
    exit_code: int | None = None
    why: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    scheduler_id: str | None = None
    tasks: Mapping[str, int] = field(default_factory=dict)
    bad_nodes: tuple[str, ...] = ()
    restarts: int = 0
    pid: int | None = None
    identity: str | None = None
    silence: str = ""


@dataclass(frozen=True)
class Job:
    """One submitted job, at the time it was read.

    Attributes:
        id: its id in this package, such as ``polaris-12``.
        site: name of the profile.
        scheduler: the scheduler of the profile.
        request: the request, with all defaults filled in.
        directory: the folder of its script, output and record.
        submitted_at: seconds since the epoch.
        progress: its progress.
        previous: the part of a chain that this one continues.
        resumes: the job of which this one is a resubmission.
        known_at: time of the scheduler's last answer, in seconds since the epoch.
    """

    id: str
    site: str
    scheduler: str
    request: JobRequest
    directory: Path
    submitted_at: float
    progress: Progress = Progress()
    previous: str | None = None
    resumes: str | None = None
    known_at: float | None = None

    @property
    def name(self) -> str:
        """The name that schedulers show."""
        return self.request.name or self.id

    @property
    def state(self) -> JobState:
        """The state at the time the job was read."""
        return self.progress.state

    @property
    def exit_code(self) -> int | None:
        """Exit code of the script; None before its end, or when a signal or the site ended it."""
        return self.progress.exit_code

    @property
    def script_path(self) -> Path:
        """The rendered job script."""
        return self.directory / "script.sh"

    @property
    def log_path(self) -> Path:
        """Standard output and standard error of all ranks."""
        return self.directory / "output.log"

    def log_path_of(self, index: str) -> Path:
        """Output of a task of an array, by its index or a placeholder; else :attr:`log_path`."""
        return self.directory / f"output-{index}.log" if self.request.array else self.log_path

    def task_log_path(self, task: int) -> Path:
        """Output of one task of an array."""
        number = task + 1 if self.scheduler == "lsf" else task  # LSF counts from 1
        return self.directory / f"output-{number}.log"

    def task_directory(self, task: int) -> Path:
        """The folder of the events of one task of an array."""
        return self.directory / f"task-{task}"
