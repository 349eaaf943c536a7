"""``qsgd-hpc scale``: the command line, the plan and the jobs of a study."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import choose
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.waiting import why_never_ends
from qsgd_hpc.scaling.define.definition import define
from qsgd_hpc.scaling.define.options import Scale, asked, scale_options
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.report.cli import show
from qsgd_hpc.scaling.store.folder import StudyFolder

__all__ = ["scale"]

LOCAL = "local"


@click.command(cls=Scale, context_settings={"allow_interspersed_args": False})
@scale_options
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
    from qsgd_hpc.scaling.define.plan import plan
    from qsgd_hpc.scaling.report.terminal import console
    from qsgd_hpc.scaling.run import cost
    from qsgd_hpc.scaling.run.cost import print_plan
    from qsgd_hpc.scaling.run.runner import check_sizes
    from qsgd_hpc.scaling.store.attempts import finished

    wanted = asked(ctx, words)
    site = choose(wanted.settings.get("site"))
    study = define(wanted.settings, wanted.folder, site, Path.cwd(), wanted.faults)
    folder = StudyFolder(
        options["output"] or Path("scaling-results") / f"{wanted.name}-{study.mode}"
    )
    folder.agree(study)
    limit_min = check_sizes(study)
    screen = console()
    attempts = folder.attempts()[0]
    done, times = finished(attempts), cost.measured_s(attempts)
    left = [p for p in plan(study) if p.key not in done]
    coming = cost.estimate(study, left, times, limit_min)
    print_plan(screen, study, list(done), coming)
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
    from qsgd_hpc.scaling.define.plan import plan
    from qsgd_hpc.scaling.run.progress import Progress
    from qsgd_hpc.scaling.run.runner import run
    from qsgd_hpc.scaling.store.attempts import RECORD_HINT, finished

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
