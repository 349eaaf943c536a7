"""``qsgd-hpc scale``: its options, combined with those of a study file, and its steps."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import choose
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.waiting import why_never_ends
from qsgd_hpc.launch.cluster.network import split as split_networks
from qsgd_hpc.scaling.define.definition import DEFAULTS, define, is_study_file, read_study_file
from qsgd_hpc.scaling.define.study import BITS, MODES, Study, parse_counts, plan
from qsgd_hpc.scaling.report.cli import show
from qsgd_hpc.scaling.store import RECORD_HINT, StudyFolder, finished

__all__ = ["scale"]

LOCAL = "local"


def _example(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(data("scaling").joinpath("studies/example.yaml").read_text("utf-8"), nl=False)
        ctx.exit()


# Options that are lists of words in a study file.
_WORDS = ("algorithms", "frameworks", "workloads", "filesystems")


class Scale(click.Command):
    """A command whose options end at a script, but not at a study file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((Path(a) for a in args if Path(a).suffix in (".py", ".yaml", ".yml")), None)
        if first is not None and is_study_file(first):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


def _defined(ctx: click.Context, words: tuple[str, ...]) -> tuple[Study, Site, str]:
    """Return the study of the file and the options, which take precedence, its site and its name.

    Raises:
        UsageError: there is nothing to train, or the file has faults; the message lists all.
    """
    file = Path(words[0]) if words and is_study_file(Path(words[0])) else None
    given = {name: value for name, value in ctx.params.items() if value is not None}
    if file is None and not words and "workloads" not in given:
        raise UsageError("nothing to train. Give a SCRIPT, a STUDY.yaml or --workload NAME.")
    own, faults = _settings(given)
    folder = Path.cwd()  # paths of scripts are relative to it
    if file is not None:
        if len(words) > 1:
            raise UsageError(
                f"{words[1]!r} follows the study file, which has no arguments. Put a script's "
                "arguments into its args."
            )
        settings: dict[str, Any] = {**read_study_file(file), **own}
        folder, name = file.absolute().parent, file.stem
    elif "workloads" in own:
        settings = {**own, "args": list(words)}
        name = "-".join(own["workloads"])
    else:
        settings = {**own, "scripts": [words[0]], "args": list(words[1:])}
        name = Path(words[0]).stem
    site = choose(settings.get("site"))
    return define(settings, folder, site, Path.cwd(), faults), site, name


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    faults: list[str] = []
    found = {name: value for name, value in given.items() if name in (*DEFAULTS, "site")}
    for key in _WORDS:
        if key in given:
            found[key] = [w for w in (w.strip() for w in given[key].split(",")) if w]
    if "networks" in given:
        found["networks"] = split_networks(given["networks"])
    for name, allowed in (("nodes", None), ("bits", BITS), ("batch_size", None)):
        if name in given:
            try:
                option = f"--{name.replace('_', '-')}"
                found[name] = parse_counts(given[name], option, allowed)
            except UsageError as error:
                faults += str(error).splitlines()
                found[name] = DEFAULTS[name]
    return found, tuple(faults)


@click.command(cls=Scale, context_settings={"allow_interspersed_args": False})
@click.option("--site", help="Site profile (see `qsgd-hpc sites`). Default: this machine's.")
@click.option("--nodes", help="Node counts to measure.  [default: 1,2]")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="strong: constant global batch; weak: constant batch per rank.  [default: strong]",
)
@click.option(
    "--bits",
    help="Bits per gradient element: 8, 4, 2; 32: uncompressed.  [default: 32,8,4]",
)
@click.option("--algorithms", help="Allreduce algorithms to compare.  [default: auto]")
@click.option(
    "--network",
    "networks",
    metavar="RATE[,latency=T],...",
    help="On this machine: emulate a host for each node, at each of these link rates, such as "
    "100mbit,1gbit; none: shared memory.",
)
@click.option(
    "--repeats",
    type=int,
    help="Measurements of each point; 3 or more show the noise.  [default: 1]",
)
@click.option(
    "--batch-size",
    help="Samples per step: global (strong) or per rank (weak); several are compared.  "
    "[default: 128]",
)
@click.option("--epochs", type=int, help="Passed to the script. Default: the script's own.")
@click.option("--steps", type=int, help="Passed to the script: number of steps of a run.")
@click.option(
    "--batch-args",
    help="The script's arguments for its batch size, such as '--bs {rank_batch}'; "
    "{global_batch} is that of all ranks; '' if it has none.  [default: --global-batch-size "
    "or --batch-size, by the mode]",
)
@click.option(
    "--target",
    type=float,
    help="Test accuracy (or perplexity, above 1); the time to reach it is reported.  "
    "[default: the value that fp32 reaches]",
)
@click.option("--workload", "workloads", help="Workloads of this package, such as resnet34,mnist.")
@click.option(
    "--framework", "frameworks", help="Frameworks of the workloads: torch, keras.  [default: torch]"
)
@click.option("--ranks-per-node", type=int, help="Default: the site's, such as one per GPU.")
@click.option(
    "--walltime",
    help="Walltime of each job, such as 30m or 1h30m; a plain number is minutes. "
    "Default: the site's.",
)
@click.option("--queue", help="Queue of every job.")
@click.option("--account", help="Project to charge for the jobs.")
@click.option("--filesystems", help="File systems of the jobs, such as home,eagle.")
@click.option(
    "--python", help="Python interpreter for the scripts on the nodes; it needs qsgd_hpc."
)
@click.option("--max-node-hours", type=float, help="Submit nothing if the study could cost more.")
@click.option(
    "--pack/--separate",
    default=None,
    help="Run all points in one job of the largest size, or in a job each.  [default: separate]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Study folder. Default: scaling-results/<script or study file>-<mode>.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Largest number of jobs queued at a time.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting to a batch system.")
@click.option("--dry-run", is_flag=True, help="Print the plan and its cost without running it.")
@click.option(
    "--example",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_example,
    help="Print a commented study file.",
)
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGUMENTS]... | STUDY.yaml",
)
@click.pass_context
def scale(ctx: click.Context, /, words: tuple[str, ...], **options: Any) -> None:
    """Measure the scaling of a training over nodes and bits, and write a report.

    Trains your SCRIPT (later arguments are passed to it), workloads of this package (--workload),
    or the trainings of a study file (STUDY.yaml; options can stand before or after it).

    Each point is a separate job, or with --pack a part of one large job, with QSGD_BITS set. The
    study appends --global-batch-size B (strong) or --batch-size B (weak) to the script's arguments,
    and --epochs E and --steps N if given. A script that uses qsgd_hpc needs no change. With a Meter
    (`from qsgd_hpc.scaling import Meter`) the report also has accuracies and the parts of a step's
    time.

    To resume a study, run the same command again: finished points are skipped, failed points are
    repeated, and all measurements are kept.

    \b
    On this machine:  qsgd-hpc scale --nodes 1,2 --bits 32,8,4 train.py
    Workloads:        qsgd-hpc scale --workload resnet34,mnist --framework torch,keras
    On a cluster:     qsgd-hpc scale --site polaris --nodes 1,2,4 --walltime 20m train.py
    In one job:       qsgd-hpc scale --site polaris --nodes 1,2,4,8 --pack --walltime 1h train.py
    From a file:      qsgd-hpc scale study.yaml
    Only the plan:    qsgd-hpc scale --dry-run study.yaml

    A study file has the same settings under the same names. In addition, each workload can have its
    own batch sizes, limits and arguments. Start from the commented example:

    \b
        qsgd-hpc scale --example > study.yaml
    """
    from qsgd_hpc.scaling.report.terminal import console
    from qsgd_hpc.scaling.run import cost
    from qsgd_hpc.scaling.run.runner import check_sizes

    study, site, name = _defined(ctx, words)
    folder = StudyFolder(options["output"] or Path("scaling-results") / f"{name}-{study.mode}")
    folder.agree(study)
    limit_min = check_sizes(study)
    screen = console()
    attempts = folder.attempts()[0]
    done, times = finished(attempts), cost.measured_s(attempts)
    left = [p for p in plan(study) if p.key not in done]
    coming = cost.estimate(study, left, times, limit_min)
    cost.print_plan(screen, study, list(done), coming)
    cost.refuse(study, left, times, cost.spent(attempts), limit_min)
    if options["dry_run"]:
        return
    if site.scheduler == LOCAL and (reason := why_never_ends()):
        raise UsageError(
            f"a study here would never end: {reason}. Run `qsgd-hpc scale` outside of the job."
        )
    _consent(site, options["yes"])
    folder.create(study)
    with folder.locked():
        _measure(folder, study, screen, options["in_flight"], limit_min)


def _consent(site: Site, yes: bool) -> None:
    if site.scheduler == LOCAL or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"jobs on site {site.name} cost node-hours. Add --yes to submit them.")
    click.confirm("Submit these jobs?", abort=True)


def _measure(
    folder: StudyFolder, study: Study, screen: Any, in_flight: int, limit_min: float | None
) -> None:
    from qsgd_hpc.scaling.run.progress import Progress
    from qsgd_hpc.scaling.run.runner import run

    done = finished(folder.attempts()[0])
    progress = Progress(screen, len(plan(study)), len(done), cases=len(study.cases))
    try:
        with _terminable(), progress.shown():
            failed = run(folder, study, progress, in_flight=in_flight, limit_min=limit_min)
    except KeyboardInterrupt:
        kept = len(finished(folder.attempts()[0]))
        click.echo(
            f"\nStopped; the running job was cancelled. {kept} of {progress.total} points are "
            "finished and kept. Run the same command to resume.",
            err=True,
        )
        sys.exit(130)
    hint = f"\n{RECORD_HINT}" if any(a.silent for a in failed) else ""
    if progress.done == 0:
        raise UsageError(
            f"all {len(failed)} points failed; there is no report. The end of each log is above; "
            f"the logs are in {folder.path / 'points'}.{hint}"
        )
    show(folder, screen, None)
    if failed:
        click.echo(
            f"{len(failed)} of {progress.total} points failed and are not in the table. Run the "
            f"same command to repeat them.{hint}",
            err=True,
        )
        sys.exit(1)


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM end the study like Ctrl-C: jobs are cancelled, the study can be resumed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
