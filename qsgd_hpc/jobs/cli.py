"""The verbs submit, status, logs, wait, cancel, list and sites."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import api, registry, view
from qsgd_hpc.jobs import sites as profiles
from qsgd_hpc.jobs.model import Job, JobRequest, JobState
from qsgd_hpc.jobs.words import minutes

__all__ = ["cancel", "list_jobs", "logs", "sites", "status", "submit", "wait"]

FOLLOW_S = 0.3
TIMED_OUT = 3
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class _Walltime(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return value if isinstance(value, float) else minutes(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def _variables(
    _ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    for word in given:
        if "=" not in word:
            raise click.BadParameter(f"{word!r} has no '='. Write --env NAME=VALUE.")
    return dict(word.split("=", 1) for word in given)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes",
    type=int,
    default=1,
    show_default=True,
    help="Nodes; on a machine without a scheduler, groups of ranks.",
)
@click.option("--ranks-per-node", type=int, help="Default: one per GPU; one where there is none.")
@click.option("--walltime", type=_Walltime(), help="30m, 90s, 2h or 1:00:00. Default: the site's.")
@click.option("--queue", help="Queue, partition or QOS. Default: the first that takes the job.")
@click.option("--account", help="Project that pays. Default: QSGD_ACCOUNT, then the profile's.")
@click.option(
    "--filesystems", help="Those that the job uses, as in home,eagle. Default: the site's."
)
@click.option(
    "--site",
    help="Profile to use (see `qsgd-hpc sites list`). Default: QSGD_SITE, then "
    "the site of this login host, then this machine.",
)
@click.option("--name", help="Name of the job. Default: made from the script's.")
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_variables,
    help="Variable for every rank; repeat for more.",
)
@click.option("--python", help="Interpreter of the script on the nodes.")
@click.option("--dry-run", is_flag=True, help="Print the job script and submit nothing.")
@_AS_JSON
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str,
    script_args: tuple[str, ...],
    walltime: float | None,
    filesystems: str | None,
    variables: dict[str, str],
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check, render and submit a job that runs SCRIPT on every rank.

    Everything after SCRIPT belongs to the script. A fault is reported before anything is
    submitted, all faults at once.

    \b
    On this machine:      qsgd-hpc submit --nodes 2 train.py --epochs 3
    See a PBS script:     qsgd-hpc submit --site polaris --account proj --nodes 8 --dry-run train.py
    """
    request = JobRequest(
        script=Path(script),
        script_args=script_args,
        walltime_min=walltime,
        filesystems=tuple(f for f in (filesystems or "").replace(":", ",").split(",") if f),
        env=variables,
        **options,
    )
    if dry_run:
        text = api.render(request)
        text = json.dumps({"script": text}) if as_json else text
        click.echo(text.encode("utf-8", "surrogateescape"), nl=as_json)
        return
    job = api.submit(request)
    if as_json:
        _print_json(view.as_json(job))
        return
    click.echo(f"{job.id} submitted to {job.site}")
    click.echo(f"  script  {job.script_path}")
    click.echo(f"  follow  qsgd-hpc logs -f {job.id}")
    click.echo(f"  state   qsgd-hpc status {job.id}")
    click.echo(f"  end it  qsgd-hpc cancel {job.id}")


@click.command()
@click.argument("job_id", metavar="ID", required=False)
@_AS_JSON
def status(job_id: str | None, as_json: bool) -> None:
    """Show the state of job ID (default: the newest), why, where its log is and what to do next."""
    job = api.get(job_id or _newest())
    if as_json:
        _print_json(view.as_json(job))
    else:
        click.echo("\n".join(view.status_lines(job)))


@click.command()
@click.argument("job_id", metavar="ID", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the job has ended.")
def logs(job_id: str | None, follow: bool) -> None:
    """Print the output of all ranks of job ID (default: the newest)."""
    job = api.get(job_id or _newest())
    if not job.log_path.exists() and not follow:
        click.echo(f"{job.id} is {job.state.value}: no output yet", err=True)
        return
    position = _print_from(job.log_path, 0)
    asked_s = time.monotonic()
    while follow and not job.state.ended:
        time.sleep(FOLLOW_S)
        if time.monotonic() - asked_s >= api.poll_s(job):
            job, asked_s = api.get(job.id), time.monotonic()
        position = _print_from(job.log_path, position)
    # What was written between the last look and the end.
    _print_from(job.log_path, position)
    if follow:
        click.echo(f"{job.id} {job.state.value} {job.progress.why}".rstrip(), err=True)


def _print_from(path: Path, position: int) -> int:
    """Copy the file from a position on to standard output and return the new position."""
    if not path.exists():
        return position
    out = sys.stdout.buffer
    with path.open("rb") as stream:
        stream.seek(position)
        while block := stream.read(1 << 16):
            out.write(block)
            position += len(block)
    out.flush()
    return position


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", type=_Walltime(), help="Give up after 30m, 90s, 2h; exit code 3 then.")
@_AS_JSON
def wait(job_ids: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until jobs have ended. Exit code 0: all completed; 1: a job did not."""
    timeout_s = None if timeout is None else timeout * 60
    try:
        jobs = api.wait(job_ids, timeout_s, on_change=None if as_json else _say)
    except KeyboardInterrupt:
        click.echo("stopped waiting; the jobs go on", err=True)
        sys.exit(130)
    if as_json:
        _print_json([view.as_json(job) for job in jobs])
    if any(not job.state.ended for job in jobs):
        sys.exit(TIMED_OUT)
    sys.exit(0 if all(job.state is JobState.COMPLETED for job in jobs) else 1)


def _say(job: Job) -> None:
    why = f" ({job.progress.why})" if job.progress.why else ""
    log = f"  {job.log_path}" if job.state.ended and job.state is not JobState.COMPLETED else ""
    click.echo(f"{job.id} {job.state.value}{why}{log}")


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
def cancel(job_ids: tuple[str, ...]) -> None:
    """End jobs and every process that they have started."""
    faults = []
    for job_id in job_ids:
        try:
            before = api.get(job_id)
            job = api.cancel(job_id)
        except (UsageError, LaunchError) as error:
            faults.append(str(error))
            continue
        had = "had already ended: " if before.state.ended else ""
        end = "" if job.state.ended else ", asked to end"
        click.echo(f"{job.id} {had}{job.state.value}{end}")
    if faults:
        raise UsageError("\n".join(faults))


@click.command("list")
@_AS_JSON
def list_jobs(as_json: bool) -> None:
    """List your jobs, newest first."""
    jobs = api.list_jobs()[::-1]
    if as_json:
        _print_json([view.as_json(job) for job in jobs])
    elif jobs:
        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(view.table(jobs))
    else:
        click.echo("no jobs yet; submit one with `qsgd-hpc submit train.py`", err=True)


@click.group()
def sites() -> None:
    """List or show the site profiles; your own go to $QSGD_HOME/sites/NAME.yaml."""


@sites.command("list")
def list_sites() -> None:
    """List all profiles and mark the one that is used here."""
    try:
        here = profiles.choose(None, profiles.find_host()).name
    except UsageError:
        here = None
    for name in profiles.names():
        try:
            text = profiles.load(name).description
        except UsageError as error:
            text = f"not usable. {error}"
        click.echo(f"{'*' if name == here else ' '} {name:<16}{text}")


@sites.command("show")
@click.argument("name")
def show_site(name: str) -> None:
    """Show a profile: its queues and notes, then the YAML to copy from."""
    click.echo("\n".join(view.site_lines(profiles.load(name))))
    for where, text in profiles.sources(name):
        click.echo(f"\n# --- {where}\n{text}", nl=False)


def _newest() -> str:
    jobs = registry.ids()
    if not jobs:
        raise UsageError("no jobs yet. Submit one with `qsgd-hpc submit train.py`.")
    return max(jobs, key=lambda job_id: registry.load(job_id).submitted_at)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
