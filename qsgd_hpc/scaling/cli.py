"""``qsgd-hpc scale`` and ``qsgd-hpc report``."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest
from qsgd_hpc.jobs.profile import Site
from qsgd_hpc.jobs.sites import choose, find_host
from qsgd_hpc.jobs.validate import fill
from qsgd_hpc.jobs.words import minutes
from qsgd_hpc.scaling.folder import StudyFolder
from qsgd_hpc.scaling.plan import equal_threads
from qsgd_hpc.scaling.study import BITS, MODES, Study, parse_counts

__all__ = ["report", "scale"]

LOCAL = "local"
POLL_S = {LOCAL: 0.3}
BATCH_POLL_S = 15.0


@click.command(context_settings={"allow_interspersed_args": False, "show_default": True})
@click.option("--site", help="Site profile. Default: this machine's, see `qsgd-hpc sites`.")
@click.option("--nodes", default="1,2", help="Node counts to measure.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="strong",
    help="strong: the global batch stays the same; weak: the batch of each rank does.",
)
@click.option("--bits", default="32,8,4", help="Bits per gradient element; 32 is plain float32.")
@click.option("--repeats", default=1, help="Measurements of each point. From 3 on, noise shows.")
@click.option(
    "--batch-size", default=128, help="Images per step: global (strong), per rank (weak)."
)
@click.option("--epochs", type=int, help="Passed on to the script. Default: the script's own.")
@click.option("--ranks-per-node", type=int, help="Default: the site's, such as one per GPU.")
@click.option("--walltime", help="Limit of each job, such as 30m or 1h30m. Default: the site's.")
@click.option("--queue", help="Queue of every job.")
@click.option("--account", help="Project that pays for the jobs.")
@click.option("--filesystems", help="File systems that the jobs need, such as home,eagle.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Study folder. Default: scaling-results/<script>-<mode>.",
)
@click.option("--in-flight", type=click.IntRange(1), default=1, help="Jobs queued at a time.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before submitting to a batch system.")
@click.option("--dry-run", is_flag=True, help="Print the plan; run and write nothing.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def scale(script: Path, script_args: tuple[str, ...], **options: Any) -> None:
    """Measure how SCRIPT scales over nodes and bits, and write the report.

    What follows SCRIPT belongs to it. Each point is a job with QSGD_BITS set; the study appends
    --global-batch-size B (strong) or --batch-size B (weak) to the script's arguments. SCRIPT takes
    part with one line on rank 0:

    \b
        from qsgd_hpc.scaling import record
        record("final", ranks=hvd.size(), images_per_s=..., test_accuracy=...)

    Run the same command again to resume a study: finished points are skipped, failed ones are
    tried again, and nothing that was measured is lost.

    \b
    On this machine:  qsgd-hpc scale --nodes 1,2 --bits 32,8,4 train.py
    On a cluster:     qsgd-hpc scale --site polaris --nodes 1,2,4 --walltime 20m train.py
    Only the plan:    qsgd-hpc scale --dry-run --nodes 1,2,4 train.py
    """
    from qsgd_hpc.scaling.attempts import finished
    from qsgd_hpc.scaling.run import check_sizes
    from qsgd_hpc.scaling.terminal import console, print_plan

    site = choose(options["site"], find_host())
    study = _study(script, script_args, options, site)
    path = options["output"] or Path("scaling-results") / f"{script.stem}-{study.mode}"
    folder = StudyFolder(path)
    folder.agree(study)
    check_sizes(study)
    screen = console()
    done = finished(folder.attempts()[0])
    print_plan(screen, study, list(done))
    if options["dry_run"]:
        return
    _consent(site, options["yes"])
    folder.create(study)
    with folder.locked():
        _measure(folder, study, site, screen, options["in_flight"])


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where to write. Default: FOLDER."
)
def report(folder: Path, output: Path | None) -> None:
    """Write the report of the study in FOLDER again, from its raw records alone.

    Writes report.html, REPORT.md, results.csv, plot.png and plot.svg. The same records give the
    same files, so every number can be checked.
    """
    from qsgd_hpc.scaling.terminal import console

    _report(StudyFolder(folder), console(), output)


def _study(
    script: Path, script_args: tuple[str, ...], options: dict[str, Any], site: Site
) -> Study:
    faults: list[str] = []
    nodes, bits = [1], [32]
    try:
        nodes = parse_counts(options["nodes"], "--nodes")
    except UsageError as error:
        faults += str(error).splitlines()
    try:
        bits = parse_counts(options["bits"], "--bits", allowed=BITS)
    except UsageError as error:
        faults += str(error).splitlines()
    walltime_min = None
    if options["walltime"] is not None:
        try:
            walltime_min = minutes(options["walltime"])
        except UsageError as error:
            faults.append(str(error))
    ranks_per_node = options["ranks_per_node"]
    if ranks_per_node is None:
        ranks_per_node = fill(JobRequest(script), site).ranks_per_node or 1
    study = Study(
        script=script.absolute(),
        workdir=Path.cwd(),
        script_args=script_args,
        mode=options["mode"],
        nodes=tuple(sorted(nodes)),
        bits=tuple(sorted(bits, reverse=True)),
        ranks_per_node=ranks_per_node,
        site=site.name,
        repeats=options["repeats"],
        batch_size=options["batch_size"],
        epochs=options["epochs"],
        walltime_min=walltime_min,
        queue=options["queue"],
        account=options["account"],
        filesystems=tuple(w for w in (options["filesystems"] or "").split(",") if w),
    )
    try:
        study.check()
        if site.scheduler == LOCAL:
            cores = len(os.sched_getaffinity(0))
            study = dataclasses.replace(study, threads=equal_threads(cores, study))
    except UsageError as error:
        faults += str(error).splitlines()
    if faults:
        raise UsageError("\n".join(faults))
    return study


def _consent(site: Site, yes: bool) -> None:
    if site.scheduler == LOCAL or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"jobs on site {site.name} cost node-hours. Add --yes to submit them.")
    click.confirm("Submit these jobs?", abort=True)


def _measure(folder: StudyFolder, study: Study, site: Site, screen: Any, in_flight: int) -> None:
    from qsgd_hpc.scaling.attempts import finished
    from qsgd_hpc.scaling.plan import plan
    from qsgd_hpc.scaling.progress import Progress
    from qsgd_hpc.scaling.run import run

    done = finished(folder.attempts()[0])
    progress = Progress(screen, total=len(plan(study)), done=len(done))
    poll_s = POLL_S.get(site.scheduler, BATCH_POLL_S)
    try:
        with _terminable(), progress.shown():
            failed = run(folder, study, progress, in_flight=in_flight, poll_s=poll_s)
    except KeyboardInterrupt:
        click.echo(
            f"\nStopped; the running job was cancelled. {progress.done} of {progress.total} points "
            "are finished and kept. Run the same command to go on.",
            err=True,
        )
        sys.exit(130)
    if progress.done == 0:
        raise UsageError(
            f"all {len(failed)} points failed, so there is nothing to report. The end of each log "
            f"is above; the logs are in {folder.path / 'points'}."
        )
    _report(folder, screen, None)
    if failed:
        click.echo(
            f"{len(failed)} of {progress.total} points failed and are not in the table. Run the "
            "same command to try them again.",
            err=True,
        )
        sys.exit(1)


def _report(folder: StudyFolder, screen: Any, target: Path | None) -> None:
    # pandas and matplotlib are loaded here, not when the command line starts.
    from qsgd_hpc.scaling.report import load, write
    from qsgd_hpc.scaling.terminal import print_result

    loaded = load(folder)
    print_result(screen, loaded, write(loaded, target or folder.path))


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the study like Ctrl-C: jobs cancelled, study resumable."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
