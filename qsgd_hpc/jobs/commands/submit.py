"""The commands submit and resubmit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import current, sites, submission, waiting
from qsgd_hpc.jobs.commands import view
from qsgd_hpc.jobs.commands.jobs import Walltime, follow
from qsgd_hpc.jobs.commands.view import as_json_option
from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.request.prepare import RUN_MODULE, prepare
from qsgd_hpc.jobs.request.python_fit import WARNING
from qsgd_hpc.jobs.waiting import why_never_ends
from qsgd_hpc.launch.option_types import TranslatingCommand, training_options
from qsgd_hpc.launch.options import bits_variables

__all__ = ["resubmit", "submit"]

# Flags of other programs, for those who type them from habit.
_FOREIGN = {
    "qsgd-hpc run": {
        "-n -np --num-proc": "use --nodes, and --ranks-per-node for the ranks of each",
        "-H --hosts --hostfile": "use --nodes; the scheduler selects the hosts",
    },
    "torchrun": {
        "--nproc-per-node": "use --ranks-per-node",
        "--nnodes": "use --nodes",
        "--node-rank": "leave it out: the job starts the ranks of all its nodes",
        "--max-restarts": "use --requeue or --chain",
        "--module": RUN_MODULE,
        "--standalone --master-addr --master-port --local-addr"
        " --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf": (
            "leave it out: the job decides where its ranks meet"
        ),
    },
    "the scheduler": {
        "--time -t": "use --walltime",
        "--qos --partition -q -p": "use --queue",
        "-N": "use --nodes; for the name of the job, --name",
        "--ntasks-per-node --tasks-per-node": "use --ranks-per-node",
        "--job-name -J": "use --name",
        "-A --project": "use --account",
        "--dependency -d": "use --after",
        "-l": "use --nodes, --walltime and --filesystems, and --extra for the rest",
        "--gpus -G --gpus-per-node --gpus-per-task --gres --cpus-per-task -c": (
            "leave it out: the site's profile assigns GPUs and cores to the ranks of each node"
        ),
        "--output -o --error -e": (
            "leave it out: `qsgd-hpc logs` shows the output, `qsgd-hpc status` its file"
        ),
        "--constraint -C --mem --reservation --licenses -L --signal --begin --mail-type --mail-user"
        " -M --exclusive --nice --comment": "use --extra, as in --extra '#SBATCH --mem=64G'",
    },
    "Python": {"-m": RUN_MODULE},
}


class _Submit(TranslatingCommand):
    foreign = _FOREIGN


def _pairs(flag: str, example: str) -> Callable[..., dict[str, str]]:
    def parse(_ctx: Any, _param: Any, given: tuple[str, ...]) -> dict[str, str]:
        for word in given:
            if "=" not in word:
                raise click.BadParameter(f"{word!r} has no '='. Write {flag} {example}.")
        pairs = dict(word.split("=", 1) for word in given)
        if flag == "--array" and len(pairs) < len(given):
            raise click.BadParameter("a key is repeated. Write all its values at once: KEY=A,B.")
        return pairs

    return parse


def _words(_ctx: Any, _param: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    """Accept repeated values, comma-separated values, or both."""
    return tuple(word for value in given for word in value.split(",") if word)


def _list_option(
    flag: str, metavar: str, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option with several values, repeated or comma-separated."""
    return click.option(flag, multiple=True, metavar=metavar, callback=_words, help=text)


@click.command(cls=_Submit, context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes",
    type=int,
    default=1,
    show_default=True,
    help="Number of nodes; without a scheduler, groups of ranks on this machine.",
)
@click.option("--ranks-per-node", type=int, help="Default: one per GPU, or one without GPUs.")
@click.option(
    "--network",
    metavar="RATE[,latency=T]",
    help="On this machine: emulate a host for each node; links of 100mbit, 1gbit, ...",
)
@click.option(
    "--walltime",
    type=Walltime(),
    help="30m, 2h or 1:00:00; a plain number is minutes. Default: the site's.",
)
@click.option(
    "--queue",
    help="Queue, partition or QOS; auto: the first that fits. Default: the site's, or auto.",
)
@click.option("--account", help="Project to charge. Default: QSGD_ACCOUNT, then the profile's.")
@click.option(
    "--filesystems", help="File systems of the job, as in home,eagle. Default: the site's."
)
@click.option(
    "--site",
    help="Site profile (see `qsgd-hpc sites list`). Default: QSGD_SITE, then the site of "
    "this login host, then this machine.",
)
@click.option("--name", help="Name of the job. Default: derived from the script's.")
@click.option(
    "--workdir",
    type=click.Path(path_type=Path),
    help="Folder in which the job runs, and which contains SCRIPT. Default: this one.",
)
@_list_option("--modules", "A,B", "Environment modules to load in the job.")
@click.option("--conda", metavar="ENV", help="Conda environment to activate in the job.")
@click.option(
    "--venv", type=click.Path(path_type=Path), help="Virtual environment to activate in the job."
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs("--env", "NAME=VALUE"),
    help="Environment variable for every rank; can be repeated.",
)
@training_options()
@click.option(
    "--python",
    help="Python interpreter for the script on the nodes. Default: that of --venv or --conda, "
    "then the site's, then this one.",
)
@click.option(
    "--gpu-view",
    type=click.Choice(["all", "one"]),
    help="GPUs that a rank sees. all: those of its node, its own at index local_rank; one: "
    "its own only. Default: the site's.",
)
@_list_option(
    "--without",
    "LIBRARY",
    "Omit the profile's settings for a library: nccl, rccl or ccl.",
)
@_list_option("--after", "ID", "Start after job ID has completed; any:ID: after it has ended.")
@click.option(
    "--chain",
    type=int,
    default=1,
    metavar="N",
    help="Submit up to N jobs in sequence; each resumes from the checkpoint of the last.",
)
@click.option(
    "--requeue",
    is_flag=True,
    help="Make the scheduler restart the job if a node fails; with Slurm and LSF also if the "
    "script ends with exit code 85, at a checkpoint.",
)
@click.option(
    "--stop-before",
    type=Walltime(),
    help="Time needed to write a checkpoint: should_stop() becomes true this long before the "
    "walltime; a plain number is minutes. Default: 5m, or a tenth of a short walltime.",
)
@click.option(
    "--array",
    multiple=True,
    metavar="KEY=A,B",
    callback=_pairs("--array", "KEY=A,B"),
    help="Run one task per value, with --KEY VALUE after the script's arguments; if repeated, "
    "one per combination.",
)
@click.option(
    "--at-once", type=int, metavar="N", help="Largest number of tasks that run concurrently."
)
@_list_option("--exclude", "NODE", "Nodes to exclude.")
@click.option("--key", help="Idempotency key: a second submission with the same key has no effect.")
@click.option(
    "--extra",
    multiple=True,
    metavar="DIRECTIVE",
    help="Additional directive for the scheduler, as in --extra '#PBS -l place=free'.",
)
@click.option(
    "--template", type=click.Path(path_type=Path), help="Custom Jinja2 template for the job script."
)
@click.option("--dry-run", is_flag=True, help="Print the job script without submitting it.")
@click.option("--watch", is_flag=True, help="Follow the output until the job has ended.")
@click.option(
    "--verify-pinning",
    is_flag=True,
    help="Run a short job of this shape instead, and draw the cores and the GPU of each rank; "
    "with --dry-run, draw the expected ones.",
)
@as_json_option
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
@_list_option("--exclude", "NODE", "Nodes to exclude, in addition to failed ones.")
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
        follow(first)


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
