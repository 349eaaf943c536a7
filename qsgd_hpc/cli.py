"""The ``qsgd-hpc`` command: a table of verbs, and errors without traceback.

A verb's module is imported on use, so ``qsgd-hpc --help`` is fast on a login node.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import math
import sys
from typing import Any

import click

from qsgd_hpc import __version__
from qsgd_hpc._notices import listening
from qsgd_hpc.errors import QsgdError

__all__ = ["Finite", "main", "main_of"]

# Missing rights, and full or read-only file systems.
_FILE_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
)

# verb -> (module:function, one line for --help), in the order of a typical workflow.
VERBS: dict[str, tuple[str, str]] = {
    "convert": (
        "qsgd_hpc.eight_steps.convert.cli:convert",
        "Convert a serial training script to a distributed one.",
    ),
    "check": (
        "qsgd_hpc.eight_steps.check.cli:check_command",
        "Check a distributed script for missing steps and mistakes.",
    ),
    "run": ("qsgd_hpc.launch.cli:run", "Start ranks on this machine or on a list of hosts."),
    "submit": ("qsgd_hpc.jobs.commands.submit:submit", "Render, check and submit a batch job."),
    "resubmit": (
        "qsgd_hpc.jobs.commands.submit:resubmit",
        "Submit a job again after it has ended.",
    ),
    "status": ("qsgd_hpc.jobs.commands.jobs:status", "Show the state of one job."),
    "logs": ("qsgd_hpc.jobs.commands.jobs:logs", "Print or follow a job's output."),
    "wait": ("qsgd_hpc.jobs.commands.jobs:wait", "Wait until jobs have ended."),
    "cancel": ("qsgd_hpc.jobs.commands.jobs:cancel", "Cancel jobs."),
    "list": ("qsgd_hpc.jobs.commands.jobs:list_jobs", "List your jobs, newest first."),
    "sites": (
        "qsgd_hpc.jobs.commands.sites:sites",
        "List, show, check or write site profiles.",
    ),
    "doctor": ("qsgd_hpc.doctor:doctor", "Check this installation and report faults."),
    "bench": ("qsgd_hpc.bench.cli:bench", "Benchmark codecs and allreduces."),
    "timeline": (
        "qsgd_hpc.timeline.cli:timeline",
        "Summarise or merge timelines of collectives.",
    ),
    "export": (
        "qsgd_hpc.export.cli:export",
        "Export a trained model so that it loads without qsgd-hpc.",
    ),
    "scale": ("qsgd_hpc.scaling.cli:scale", "Run a scaling study and write its report."),
    "report": (
        "qsgd_hpc.scaling.report.cli:report",
        "Write a study's report again from its records.",
    ),
    "predict": (
        "qsgd_hpc.scaling.predict.cli:predict",
        "Predict a measured training on more nodes of a machine.",
    ),
    "reproduce": (
        "qsgd_hpc.scaling.reproduce:reproduce",
        "Compare published results with predictions or measurements made here.",
    ),
}


class Finite(click.FloatRange):
    """A finite number in a range; click's own range accepts NaN, and infinity if it is open."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class LazyVerbs(click.Group):
    """A command group whose verbs are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word.endswith(".py"):
            ctx.fail(f"{word} is a script. Start it by: qsgd-hpc run -np 2 {word}")
        if word not in VERBS and (near := difflib.get_close_matches(word, VERBS, n=1)):
            ctx.fail(f"No such command '{word}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module, _, attribute = VERBS[name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=LazyVerbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qsgd-hpc")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train on many nodes with 4 to 16 times fewer gradient bytes.

    \b
    Convert a serial script:  qsgd-hpc convert train.py -o train_hvd.py
    Run it on two ranks:      qsgd-hpc run -np 2 --bits 4 python train.py
    Submit it as a job:       qsgd-hpc submit --nodes 8 train.py
    Show the batch script:    qsgd-hpc submit --site polaris --nodes 8 --dry-run train.py
    Measure its scaling:      qsgd-hpc scale --nodes 1,2 --bits 32,8,4 train.py
    """
    ctx.with_resource(listening(lambda text: click.echo(f"qsgd-hpc: {text}", err=True)))


def main(argv: list[str] | None = None) -> None:
    """Run the command line; for a :class:`QsgdError`, print its message and exit with code 2."""
    try:
        cli.main(args=argv, prog_name="qsgd-hpc", standalone_mode=True)
    except QsgdError as error:
        for line in str(error).splitlines():
            click.echo(f"qsgd-hpc: {line}", err=True)
        sys.exit(2)
    except OSError as error:
        if (text := _of_the_users_files(error)) is None:
            raise
        click.echo(f"qsgd-hpc: {text}", err=True)
        sys.exit(2)


def _of_the_users_files(error: OSError) -> str | None:
    """Return a message about a file or disk of the user; None if the error is another one."""
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder no longer exists; change to another one"
    if error.errno not in _FILE_ERRORS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"


def main_of(module: str) -> None:
    """Run the verb of a module: ``python -m qsgd_hpc.doctor`` is ``qsgd-hpc doctor``.

    If the module has several verbs, the first argument must name one, as for ``qsgd-hpc``.
    """
    verbs = [verb for verb, (place, _) in VERBS.items() if place.partition(":")[0] == module]
    main([*(verbs if len(verbs) == 1 else ()), *sys.argv[1:]])


if __name__ == "__main__":
    main()
