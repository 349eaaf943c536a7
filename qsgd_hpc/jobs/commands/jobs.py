"""The commands status, logs, wait, cancel and list."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from qsgd_hpc._notices import muted
from qsgd_hpc.errors import EXIT_RESUBMIT, LaunchError, UsageError
from qsgd_hpc.jobs import current, waiting
from qsgd_hpc.jobs.commands import view
from qsgd_hpc.jobs.commands.view import as_json_option
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.waiting import refuse_standstill
from qsgd_hpc.jobs.words import minutes

__all__ = ["Output", "Walltime", "cancel", "list_jobs", "logs", "status", "wait"]

FOLLOW_S = 0.3
TIMED_OUT = 3
INTERRUPTED = 130
SILENT = 4  # the scheduler does not answer: the state shown is older, or nothing was cancelled
_GOOD = (JobState.COMPLETED, JobState.STOPPED)


class Walltime(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """Minutes, written as 30m, 90s, 2h, 1h30m or 1:00:00; a plain number has the unit `plain`."""

    name = "time"

    def __init__(self, plain: str = "m") -> None:
        self.plain = plain

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return value if isinstance(value, float) else minutes(value, plain=self.plain)
        except UsageError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("job_id", metavar="[ID]", required=False)
@as_json_option
def status(job_id: str | None, as_json: bool) -> None:
    """Show the state of job ID (default: the newest), its cause, its log and the next command.

    Exit code 4: the scheduler does not answer; the state shown is the last known one.
    """
    job = current.get(job_id or _newest())
    if as_json:
        _print_json(view.as_json(job))
    else:
        after = current.continued_by(job) if job.state.ended else None
        click.echo("\n".join(view.status_lines(job, after)))
    if job.progress.silence:
        sys.exit(SILENT)


@click.command()
@click.argument("job_id", metavar="[ID]", required=False)
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Follow the output until the job has ended."
)
@click.option("--rank", type=int, help="Print the output of one rank only.")
@click.option("--task", type=int, help="Print the output of one task of an array.")
def logs(job_id: str | None, following: bool, rank: int | None, task: int | None) -> None:
    """Print the output of all ranks of job ID (default: the newest)."""
    job = current.get(job_id or _newest())
    path = _log_of(job, task)
    if not path.exists() and not following:
        click.echo(view.no_output_words(job, path), err=True)
        return
    follow(job, path, rank, once=not following)


def _log_of(job: Job, task: int | None) -> Path:
    tasks = len(job.request.tasks)
    if task is None and tasks:
        raise UsageError(f"{job.id} is an array. Name one of its tasks, --task 0 to {tasks - 1}.")
    if task is None:
        return job.log_path
    if not 0 <= task < tasks:
        raise UsageError(f"{job.id} has {tasks or 'no'} tasks, so none with number {task}.")
    return job.task_log_path(task)


def follow(
    job: Job, path: Path | None = None, rank: int | None = None, *, once: bool = False
) -> None:
    """Print a job's output until it has ended; with ``once``, the output so far."""
    output = Output(path or job.log_path, rank, job.request.ranks)
    if not once:
        refuse_standstill([job])
    patience = waiting.Patience()
    patience.begin([job])
    try:
        while not once and not job.state.ended:
            time.sleep(FOLLOW_S)
            if patience.over():
                patience.begin([job])
                with muted(bool(job.progress.silence)):
                    job = current.get(job.id)
            output.print_new()
    except KeyboardInterrupt:
        click.echo(f"stopped following; {job.id} continues", err=True)
        sys.exit(INTERRUPTED)
    # Print the lines written between the last check and the end.
    output.print_new(last=True)
    if rank is not None and job.state.ended and not output.labelled and view.has_output(job):
        raise UsageError(
            f"the lines of {job.id}'s output are not labelled with ranks: the profile of site "
            f"'{job.site}' has no option of the launcher for that (launcher: label). Show the "
            f"whole output with `qsgd-hpc logs {job.id}`."
        )
    if not once:
        click.echo(f"{job.id} {job.state.value} {job.progress.why}".rstrip(), err=True)


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--timeout",
    type=Walltime("s"),
    help="Give up after this time (exit code 3): 30m, 90s, 2h; a plain number is seconds.",
)
@as_json_option
def wait(job_ids: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until jobs and their chains have ended.

    Exit code 0: all completed; 85: a job stopped at a checkpoint and no job continues it; 1: a job
    ended otherwise; 3: timeout; 4: timeout while the scheduler did not answer.
    """
    timeout_s = None if timeout is None else timeout * 60
    parts = (
        part for job_id in job_ids for part in (job_id, *(j.id for j in current.chain(job_id)))
    )
    job_ids = tuple(dict.fromkeys(parts))
    try:
        jobs = waiting.wait(job_ids, timeout_s, on_change=None if as_json else _report)
    except KeyboardInterrupt:
        click.echo("stopped waiting; the jobs continue", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        _print_json([view.as_json(job) for job in jobs])
    if any(not job.state.ended for job in jobs):
        sys.exit(SILENT if any(job.progress.silence for job in jobs) else TIMED_OUT)
    sys.exit(_exit_code(jobs))


def _exit_code(jobs: list[Job]) -> int:
    """Return the exit code of ``wait``; for a chain, its last job decides."""
    continued = {job.previous for job in jobs}
    ends = {job.state for job in jobs if job.id not in continued}
    if ends <= {JobState.COMPLETED}:
        return 0
    return EXIT_RESUBMIT if ends <= {JobState.COMPLETED, JobState.STOPPED} else 1


def _report(job: Job) -> None:
    why = view.silence_words(job) or job.progress.why
    why = f" ({why})" if why else ""
    shown = job.state.ended and job.state not in _GOOD and view.has_output(job)
    log = f"  {view.log_words(job)}" if shown else ""
    click.echo(f"{job.id} {job.state.value}{why}{log}")


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--at-checkpoint",
    is_flag=True,
    help="Ask the script to stop at its next checkpoint instead: should_stop() becomes true.",
)
def cancel(job_ids: tuple[str, ...], at_checkpoint: bool) -> None:
    """Cancel jobs, all their processes, and the later jobs of their chains.

    Exit code 4: the scheduler did not cancel a job.
    """
    faults, failed = [], []
    for job_id in job_ids:
        try:
            before = current.get(job_id)
            if at_checkpoint:
                array = current.stop(job_id).request.array
                rest = "; its tasks that have not started will not run" if array else ""
                click.echo(f"{job_id} asked to stop at its next checkpoint{rest}")
                continue
            job = current.cancel(job_id)
        except UsageError as error:
            faults.append(str(error))
            continue
        except LaunchError as error:
            failed.append(
                f"{job_id} is not cancelled: {error} Try again: `qsgd-hpc cancel {job_id}`."
            )
            continue
        already = "had already ended: " if before.state.ended else ""
        asked = "" if job.state.ended else ", asked to end"
        click.echo(f"{job.id} {already}{job.state.value}{asked}")
    for line in failed:
        click.echo(f"qsgd-hpc: {line}", err=True)
    if faults:
        raise UsageError("\n".join(faults))
    if failed:
        sys.exit(SILENT)


@click.command("list")
@as_json_option
def list_jobs(as_json: bool) -> None:
    """List your jobs, newest first.

    Exit code 4: a scheduler does not answer; the last known state of its jobs is shown.
    """
    jobs = current.list_jobs()[::-1]
    if as_json:
        _print_json([view.as_json(job) for job in jobs])
    elif jobs:
        console = view.screen()
        console.print(view.table(jobs, console.width))
    else:
        click.echo("no jobs yet; submit one with `qsgd-hpc submit train.py`", err=True)
    if bad := current.damaged(jobs):
        click.echo(
            f"qsgd-hpc: not shown, because the record is damaged: {', '.join(bad)}. "
            f"See `qsgd-hpc status {bad[0]}`.",
            err=True,
        )
    if any(job.progress.silence for job in jobs):
        sys.exit(SILENT)


def _newest() -> str:
    jobs = current.load_all()
    if not jobs:
        raise UsageError("no jobs yet. Submit one with `qsgd-hpc submit train.py`.")
    return jobs[-1].id


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


# The labels of launchers: `[3] ` of `qsgd-hpc run` and MPICH, ` 3: ` of srun, `[1,3]<stdout>:` of
# Open MPI.
_LABEL = re.compile(rb"(?:\[ *(\d+)\] |\[\d+,(\d+)\]<std(?:out|err)>: ?|^ *(\d+): )")


def rank_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, line without its label) for the labelled lines.

    A carriage return, as of a progress bar, ends no line: launchers put no label behind it.
    """
    for line in io.BytesIO(data):
        if label := _LABEL.match(line):
            yield int(next(number for number in label.groups() if number)), line[label.end() :]


class Output:
    """A job's output file; each call prints its new lines.

    Args:
        path: the file; it need not exist yet.
        rank: print the lines of this rank only; None: the whole file.
        ranks: number of ranks of the job.

    Raises:
        UsageError: the job has no such rank.
    """

    def __init__(self, path: Path, rank: int | None, ranks: int) -> None:
        if rank is not None and not 0 <= rank < ranks:
            raise UsageError(f"--rank {rank}: the job has ranks 0 to {ranks - 1}.")
        self._path = path
        # Lines of a single rank have no labels.
        self._rank = None if ranks == 1 else rank
        self._position = 0
        self.labelled = ranks == 1
        """Whether a line with a rank label was found."""

    def print_new(self, *, last: bool = False) -> None:
        """Copy the file's new content since the last call to standard output.

        An unfinished line of one rank is held back; with ``last``, it is printed as it is.
        """
        if not self._path.exists():
            return
        out = sys.stdout.buffer
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            while block := stream.read(1 << 16):
                if self._rank is not None:
                    block += stream.readline()  # only the beginning of a line has a label
                    lines = block if last else block[: block.rfind(b"\n") + 1]
                    for rank, line in rank_lines(lines):
                        self.labelled = True
                        if rank == self._rank:
                            out.write(line)
                    self._position += len(lines)
                    if lines != block:
                        break
                else:
                    out.write(block)
                    self._position += len(block)
        out.flush()


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
