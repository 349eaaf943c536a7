"""The options of submit, by what they are about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.words import minutes
from qsgd_hpc.launch.bits import HELP, WEIGHT_BITS, WEIGHT_HELP, Bits

__all__ = ["Walltime", "as_json_option", "list_option", "submit_options"]

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class Walltime(click.ParamType[float]):
    """Minutes, written as 30m, 90s, 2h, 1h30m or 1:00:00; a plain number has the unit `plain`."""

    name = "time"

    def __init__(self, plain: str = "m") -> None:
        self.plain = plain

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return value if isinstance(value, float) else minutes(value, plain=self.plain)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def _pairs(flag: str, example: str) -> Callable[..., dict[str, str]]:
    def parse(_ctx: Any, _param: Any, given: tuple[str, ...]) -> dict[str, str]:
        for word in given:
            if "=" not in word:
                raise click.BadParameter(f"{word!r} has no '='. Write {flag} {example}.")
        return dict(word.split("=", 1) for word in given)

    return parse


def _words(_ctx: Any, _param: Any, given: tuple[str, ...]) -> tuple[str, ...]:
    """Take values one by one, with commas, or both."""
    return tuple(word for value in given for word in value.split(",") if word)


def list_option(
    flag: str, name: str, metavar: str, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option of which the user may give several values, apart or with commas."""
    return click.option(flag, name, multiple=True, metavar=metavar, callback=_words, help=text)


SHAPE = (
    click.option(
        "--nodes",
        type=int,
        default=1,
        show_default=True,
        help="Nodes; on a machine without a scheduler, groups of ranks.",
    ),
    click.option(
        "--ranks-per-node", type=int, help="Default: one per GPU; one where there is none."
    ),
    click.option(
        "--network",
        metavar="RATE[,latency=T]",
        help="On this machine: make each node a host of its own, joined at 100mbit, 1gbit, ...",
    ),
    click.option(
        "--walltime",
        type=Walltime(),
        help="30m, 2h or 1:00:00; a plain number is minutes. Default: the site's.",
    ),
    click.option(
        "--queue",
        help="Queue, partition or QOS; auto: the first that fits. Default: the site's, or auto.",
    ),
    click.option("--account", help="Project that pays. Default: QSGD_ACCOUNT, then the profile's."),
    click.option(
        "--filesystems", help="Those that the job uses, as in home,eagle. Default: the site's."
    ),
    click.option(
        "--site",
        help="Profile to use (see `qsgd-hpc sites list`). Default: QSGD_SITE, then "
        "the site of this login host, then this machine.",
    ),
    click.option("--name", help="Name of the job. Default: made from the script's."),
    click.option(
        "--workdir",
        type=click.Path(path_type=Path),
        help="Folder in which the job runs, and SCRIPT is looked for. Default: this one.",
    ),
)
ENVIRONMENT = (
    list_option("--modules", "modules", "A,B", "Environment modules that the job loads."),
    click.option("--conda", metavar="ENV", help="Conda environment that it activates."),
    click.option(
        "--venv", type=click.Path(path_type=Path), help="Virtual environment that it activates."
    ),
    click.option(
        "--env",
        "variables",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_pairs("--env", "NAME=VALUE"),
        help="Variable for every rank; repeat for more.",
    ),
    click.option(
        "--bits",
        type=Bits(),
        metavar="B",
        help=HELP,
    ),
    click.option("--weight-bits", type=WEIGHT_BITS, metavar="B", help=WEIGHT_HELP),
    click.option(
        "--horovod", is_flag=True, help='Let "import horovod" in the script mean qsgd-hpc.'
    ),
    click.option(
        "--torchrun/--no-torchrun",
        default=None,
        help="Tell each rank what torchrun would: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... "
        "Default: yes, but not with --horovod.",
    ),
    click.option("--python", help="Interpreter of the script on the nodes."),
    click.option(
        "--gpu-view",
        type=click.Choice(["all", "one"]),
        help="all: a rank sees its node's GPUs, its own at index local_rank; one: its own alone. "
        "Default: the site's.",
    ),
    list_option(
        "--without",
        "without",
        "LIBRARY",
        "Leave out what the site's profile sets for nccl, rccl or ccl.",
    ),
)
LIFE = (
    list_option("--after", "after", "ID", "Start when that job has completed; any:ID: has ended."),
    click.option(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="Up to N jobs, one after another: each goes on from the checkpoint of the one before.",
    ),
    click.option(
        "--requeue",
        is_flag=True,
        help="Let the scheduler start the job again when a node fails; Slurm and LSF also when it "
        "stops at a checkpoint.",
    ),
    click.option(
        "--stop-before",
        "stop_before",
        type=Walltime(),
        help="Time that the script needs to write a checkpoint: should_stop() turns true that long "
        "before the walltime; a plain number is minutes. Default: 5m, or a tenth of a short "
        "walltime.",
    ),
    click.option(
        "--array",
        multiple=True,
        metavar="KEY=A,B",
        callback=_pairs("--array", "KEY=A,B"),
        help="One task for each value, with --KEY VALUE after the script's arguments; repeated: "
        "for each combination.",
    ),
    click.option("--at-once", type=int, metavar="N", help="Tasks that may run at the same time."),
    list_option("--exclude", "exclude", "NODE", "Nodes that the job must not get."),
    click.option(
        "--key", help="Name of this submission: a second one with the same key submits nothing."
    ),
)
TEXT = (
    click.option(
        "--extra",
        multiple=True,
        metavar="DIRECTIVE",
        help="Further line for the scheduler, as in --extra '#PBS -l place=free'.",
    ),
    click.option(
        "--template",
        type=click.Path(path_type=Path),
        help="Jinja2 template of your own for the job script.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the job script and submit nothing."),
    click.option("--watch", is_flag=True, help="Follow the output until the job has ended."),
    click.option(
        "--verify-pinning",
        is_flag=True,
        help="Run a short job of this shape instead, and draw which cores and GPU each rank got; "
        "with --dry-run, which it should get.",
    ),
    as_json_option,
)


def submit_options(function: Any) -> Any:
    """Give a command all options of submit."""
    for option in reversed((*SHAPE, *ENVIRONMENT, *LIFE, *TEXT)):
        function = option(function)
    return function
