"""What a job is: the request, its state, and the record that the registry returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

__all__ = ["Job", "JobRequest", "JobState", "Progress"]


class JobState(str, Enum):
    """The seven states. The last five are ends.

    LOST is what can be seen now: nothing is left that runs the job, or its scheduler does not know
    it. A scheduler that knows it again later corrects that; the other ends are for ever.
    """

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    LOST = "LOST"

    @property
    def ended(self) -> bool:
        """Tell whether nothing more will happen to the job."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True)
class JobRequest:
    """What the user asks for. ``None`` and empty tuples leave the choice to the site's profile.

    Attributes:
        script: the program; a ``.py`` file is run by ``python``, anything else by itself.
        script_args: passed to the script exactly as they are.
        nodes: nodes of the machine; on the local site, groups of ranks.
        ranks_per_node: default: one per GPU, or what the profile says.
        walltime_min: limit in minutes; None: the profile's default, or none.
        env: variables for every rank.
        python: interpreter on the nodes; None: the profile's, or this one.
        workdir: where the job runs; None: the current directory.
    """

    script: Path
    script_args: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int | None = None
    walltime_min: float | None = None
    queue: str | None = None
    account: str | None = None
    filesystems: tuple[str, ...] = ()
    site: str | None = None
    name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    workdir: Path | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * (self.ranks_per_node or 1)


@dataclass(frozen=True)
class Progress:
    """How far a job is: the content of its state file. Times are seconds since the epoch."""

    state: JobState = JobState.QUEUED
    exit_code: int | None = None
    why: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    scheduler_id: str | None = None
    # Process group of a running local job and the identity of its leader, see processes.py.
    pid: int | None = None
    identity: str | None = None


@dataclass(frozen=True)
class Job:
    """One submitted job as it is now; ``request`` has every choice filled in."""

    id: str
    site: str
    scheduler: str
    request: JobRequest
    directory: Path
    submitted_at: float
    progress: Progress = Progress()

    @property
    def name(self) -> str:
        """The name that schedulers show."""
        return self.request.name or self.id

    @property
    def state(self) -> JobState:
        """The state when the job was read; ask again for a newer one."""
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
        """Standard output and standard error of all ranks, merged."""
        return self.directory / "output.log"
