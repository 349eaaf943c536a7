"""The options of submit, grouped by topic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.request.prepare import RUN_MODULE
from qsgd_hpc.jobs.words import minutes
from qsgd_hpc.launch.option_types import (
    BITS_HELP,
    WEIGHT_BITS,
    WEIGHT_HELP,
    Bits,
    TranslatingCommand,
)

__all__ = ["Submit", "Walltime", "as_json_option", "list_option", "submit_options"]

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

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


class Submit(TranslatingCommand):
    foreign = _FOREIGN


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


def list_option(
    flag: str, name: str, metavar: str, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option with several values, repeated or comma-separated."""
    return click.option(flag, name, multiple=True, metavar=metavar, callback=_words, help=text)


SHAPE = (
    click.option(
        "--nodes",
        type=int,
        default=1,
        show_default=True,
        help="Number of nodes; without a scheduler, groups of ranks on this machine.",
    ),
    click.option("--ranks-per-node", type=int, help="Default: one per GPU, or one without GPUs."),
    click.option(
        "--network",
        metavar="RATE[,latency=T]",
        help="On this machine: emulate a host for each node; links of 100mbit, 1gbit, ...",
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
    click.option("--account", help="Project to charge. Default: QSGD_ACCOUNT, then the profile's."),
    click.option(
        "--filesystems", help="File systems of the job, as in home,eagle. Default: the site's."
    ),
    click.option(
        "--site",
        help="Site profile (see `qsgd-hpc sites list`). Default: QSGD_SITE, then the site of "
        "this login host, then this machine.",
    ),
    click.option("--name", help="Name of the job. Default: derived from the script's."),
    click.option(
        "--workdir",
        type=click.Path(path_type=Path),
        help="Folder in which the job runs, and which contains SCRIPT. Default: this one.",
    ),
)
ENVIRONMENT = (
    list_option("--modules", "modules", "A,B", "Environment modules to load in the job."),
    click.option("--conda", metavar="ENV", help="Conda environment to activate in the job."),
    click.option(
        "--venv",
        type=click.Path(path_type=Path),
        help="Virtual environment to activate in the job.",
    ),
    click.option(
        "--env",
        "variables",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_pairs("--env", "NAME=VALUE"),
        help="Environment variable for every rank; can be repeated.",
    ),
    click.option("--bits", type=Bits(), metavar="B", help=BITS_HELP),
    click.option("--weight-bits", type=WEIGHT_BITS, metavar="B", help=WEIGHT_HELP),
    click.option(
        "--horovod", is_flag=True, help='Let "import horovod" in the script mean qsgd-hpc.'
    ),
    click.option(
        "--torchrun/--no-torchrun",
        default=None,
        help="Set torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... "
        "Default: yes, except with --horovod.",
    ),
    click.option(
        "--python",
        help="Python interpreter for the script on the nodes. Default: that of --venv or --conda, "
        "then the site's, then this one.",
    ),
    click.option(
        "--gpu-view",
        type=click.Choice(["all", "one"]),
        help="GPUs that a rank sees. all: those of its node, its own at index local_rank; one: "
        "its own only. Default: the site's.",
    ),
    list_option(
        "--without",
        "without",
        "LIBRARY",
        "Omit the profile's settings for a library: nccl, rccl or ccl.",
    ),
)
LIFE = (
    list_option(
        "--after", "after", "ID", "Start after job ID has completed; any:ID: after it has ended."
    ),
    click.option(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="Submit up to N jobs in sequence; each resumes from the checkpoint of the last.",
    ),
    click.option(
        "--requeue",
        is_flag=True,
        help="Make the scheduler restart the job if a node fails; with Slurm and LSF also if the "
        "script ends with exit code 85, at a checkpoint.",
    ),
    click.option(
        "--stop-before",
        "stop_before",
        type=Walltime(),
        help="Time needed to write a checkpoint: should_stop() becomes true this long before the "
        "walltime; a plain number is minutes. Default: 5m, or a tenth of a short walltime.",
    ),
    click.option(
        "--array",
        multiple=True,
        metavar="KEY=A,B",
        callback=_pairs("--array", "KEY=A,B"),
        help="Run one task per value, with --KEY VALUE after the script's arguments; if repeated, "
        "one per combination.",
    ),
    click.option(
        "--at-once", type=int, metavar="N", help="Largest number of tasks that run concurrently."
    ),
    list_option("--exclude", "exclude", "NODE", "Nodes to exclude."),
    click.option(
        "--key", help="Idempotency key: a second submission with the same key has no effect."
    ),
)
TEXT = (
    click.option(
        "--extra",
        multiple=True,
        metavar="DIRECTIVE",
        help="Additional directive for the scheduler, as in --extra '#PBS -l place=free'.",
    ),
    click.option(
        "--template",
        type=click.Path(path_type=Path),
        help="Custom Jinja2 template for the job script.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the job script without submitting it."),
    click.option("--watch", is_flag=True, help="Follow the output until the job has ended."),
    click.option(
        "--verify-pinning",
        is_flag=True,
        help="Run a short job of this shape instead, and draw the cores and the GPU of each rank; "
        "with --dry-run, draw the expected ones.",
    ),
    as_json_option,
)


def submit_options(function: Any) -> Any:
    """Add all options of submit to a command."""
    for option in reversed((*SHAPE, *ENVIRONMENT, *LIFE, *TEXT)):
        function = option(function)
    return function
