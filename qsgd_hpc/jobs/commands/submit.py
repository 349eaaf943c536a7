"""The commands submit and resubmit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import current, sites, submission, waiting
from qsgd_hpc.jobs.commands import view
from qsgd_hpc.jobs.commands.submit_options import (
    Submit,
    Walltime,
    as_json_option,
    list_option,
    submit_options,
)
from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.request.prepare import prepare
from qsgd_hpc.jobs.request.python_fit import WARNING
from qsgd_hpc.jobs.waiting import why_never_ends
from qsgd_hpc.launch.options import bits_variables

__all__ = ["resubmit", "submit"]


@click.command(cls=Submit, context_settings={"allow_interspersed_args": False})
@submit_options
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str,
    script_args: tuple[str, ...],
    walltime: float | None,
    stop_before: float | None,
    filesystems: str | None,
    variables: dict[str, str],
    bits: int | str | None,
    weight_bits: int | None,
    array: dict[str, str],
    dry_run: bool,
    watch: bool,
    verify_pinning: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check, render and submit a job that runs SCRIPT on every rank.

    Arguments after SCRIPT are passed to the script. All faults of the request are reported at once,
    before anything is submitted.

    \b
    On this machine:      qsgd-hpc submit --nodes 2 train.py --epochs 3
    A Horovod script:     qsgd-hpc submit --nodes 2 --horovod --bits 4 train.py
    Show a PBS script:    qsgd-hpc submit --site polaris --account proj --nodes 8 --dry-run train.py
    Three walltimes:      qsgd-hpc submit --nodes 8 --walltime 1h --chain 3 train.py
    Four learning rates:  qsgd-hpc submit --nodes 2 --array lr=0.1,0.2,0.4,0.8 train.py
    """
    request = JobRequest(
        script=Path(script),
        script_args=script_args,
        walltime_min=walltime,
        stop_before_min=stop_before,
        filesystems=tuple(f for f in (filesystems or "").replace(":", ",").split(",") if f),
        env={**variables, **bits_variables(bits, weight_bits)},
        array={key: tuple(v for v in text.split(",") if v) for key, text in array.items()},
        **options,
    )
    if watch:
        _check_watch(request)
    if verify_pinning and not dry_run:
        _check_standstill(request)
    if verify_pinning:
        sys.exit(0 if _verified(request, dry_run) else 1)
    if dry_run:
        text = submission.render(request, _note)
        text = json.dumps({"script": text}) if as_json else text
        click.echo(text.encode("utf-8", "surrogateescape"), nl=as_json)
        return
    known: list[Job] = []
    jobs = submission.submit_all(request, _note, known.append)
    _show(jobs, as_json, watch, is_new=jobs[0] not in known)


def _check_watch(request: JobRequest) -> None:
    if (tasks := len(request.tasks)) > 1:
        raise UsageError(
            f"--watch follows one output, but each of the {tasks} tasks of the array has its own. "
            "Remove --watch, and follow a task with `qsgd-hpc logs -f --task 0 ID`."
        )
    _check_standstill(request)


def _check_standstill(request: JobRequest) -> None:
    if (reason := why_never_ends()) and sites.choose(request.site).scheduler == "local":
        raise UsageError(
            f"following the new job here would never end: {reason}. Submit it without following "
            "it; what comes after is another job: `qsgd-hpc submit --after ID SCRIPT`."
        )


def _note(text: str) -> None:
    click.echo(text if text.startswith(WARNING) else f"note: {text}", err=True)


def _verified(request: JobRequest, dry_run: bool) -> bool:
    """Show the actual or, with ``dry_run``, the planned pinning; return whether it has no fault."""
    from qsgd_hpc.jobs.placement.verify import pinning_preview, pinning_report, pinning_request

    console = Console()
    filled, site = prepare(request, dry_run=dry_run, tell=_note)
    if dry_run:
        return pinning_preview(filled, site, console)
    job = submission.submit(pinning_request(request, site))
    click.echo(f"{job.id} submitted to {job.site}; waiting for its ranks", err=True)
    (ended,) = waiting.wait([job.id])
    return pinning_report(ended, site, console)


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--nodes", type=int, help="Another number of nodes.")
@click.option("--walltime", "walltime_min", type=Walltime(), help="Another walltime.")
@click.option("--queue", help="Another queue.")
@click.option("--account", help="Another project to charge.")
@list_option("--exclude", "exclude", "NODE", "Nodes to exclude, in addition to failed ones.")
@click.option(
    "--force", is_flag=True, help="Submit even if ID has completed, or another job continues it."
)
@click.option("--watch", is_flag=True, help="Follow the output until the job has ended.")
@as_json_option
def resubmit(job_id: str, force: bool, watch: bool, as_json: bool, **options: Any) -> None:
    """Submit job ID again after it has ended; its script resumes from the last checkpoint.

    The new job runs the same script with the same arguments in the same folder. Nodes whose
    failure ended the job are excluded if the scheduler supports it.
    """
    changes = {key: value for key, value in options.items() if value not in (None, ())}
    if watch:
        _check_watch(current.get(job_id).request)
    if "exclude" in changes:
        old = current.get(job_id)
        changes["exclude"] = tuple(
            dict.fromkeys((*old.request.exclude, *old.progress.bad_nodes, *changes["exclude"]))
        )
    _show([submission.resubmit(job_id, changes, force=force, tell=_note)], as_json, watch)


def _show(jobs: list[Job], as_json: bool, watch: bool, *, is_new: bool = True) -> None:
    first = jobs[0]
    if as_json:
        shown = [view.as_json(job) for job in jobs]
        click.echo(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    else:
        click.echo("\n".join(view.submitted_lines(jobs, is_new=is_new)))
    if watch:
        from qsgd_hpc.jobs.commands.jobs import follow

        follow(first)


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
