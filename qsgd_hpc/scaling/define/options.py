"""The options of ``qsgd-hpc scale``, and what they and a study file together ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster.network import split as split_networks
from qsgd_hpc.scaling.define.definition import DEFAULTS
from qsgd_hpc.scaling.define.study import BITS, MODES, parse_counts
from qsgd_hpc.scaling.define.study_file import is_study_file, read_study_file

__all__ = ["Asked", "Scale", "asked", "scale_options"]


def _example(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(data("scaling").joinpath("studies/example.yaml").read_text("utf-8"), nl=False)
        ctx.exit()


OPTIONS = (
    click.option("--site", help="Site profile. Default: this machine's, see `qsgd-hpc sites`."),
    click.option("--nodes", help="Node counts to measure.  [default: 1,2]"),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="strong: the global batch stays the same; weak: the batch of each rank does.  "
        "[default: strong]",
    ),
    click.option(
        "--bits", help="Bits per gradient element; 32 is plain float32.  [default: 32,8,4]"
    ),
    click.option("--algorithms", help="Allreduce algorithms to compare.  [default: auto]"),
    click.option(
        "--network",
        metavar="RATE[,latency=T],...",
        help="On this machine: make each node a host of its own, joined at each of these rates, "
        "such as 100mbit,1gbit; none: they share memory.",
    ),
    click.option(
        "--repeats",
        type=int,
        help="Measurements of each point. From 3 on, noise shows.  [default: 1]",
    ),
    click.option(
        "--batch-size",
        help="Samples per step: global (strong), per rank (weak); several to compare them.  "
        "[default: 128]",
    ),
    click.option("--epochs", type=int, help="Passed on to the script. Default: the script's own."),
    click.option("--steps", type=int, help="Passed on too: end a run after so many steps."),
    click.option(
        "--batch-args",
        help="How the script takes its batch, such as '--bs {rank_batch}'; {global_batch} is that "
        "of all ranks; '' for a script that takes none.  [default: --global-batch-size or "
        "--batch-size, by the mode]",
    ),
    click.option(
        "--target",
        type=float,
        help="Test accuracy (or perplexity, above 1) whose time to reach is reported.  "
        "[default: what fp32 reaches]",
    ),
    click.option("--workload", help="Train workloads of this package, such as resnet34,mnist."),
    click.option("--framework", help="Of the workloads: torch, keras.  [default: torch]"),
    click.option("--ranks-per-node", type=int, help="Default: the site's, such as one per GPU."),
    click.option(
        "--walltime",
        help="Limit of each job, such as 30m or 1h30m; a plain number is minutes. "
        "Default: the site's.",
    ),
    click.option("--queue", help="Queue of every job."),
    click.option("--account", help="Project that pays for the jobs."),
    click.option("--filesystems", help="File systems that the jobs need, such as home,eagle."),
    click.option("--python", help="Interpreter of the scripts on the nodes; it needs qsgd_hpc."),
    click.option(
        "--max-node-hours", type=float, help="Submit nothing that could cost more than this in all."
    ),
    click.option(
        "--pack/--separate",
        default=None,
        help="All points inside one job of the largest size, or a job for each.  "
        "[default: separate]",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        help="Study folder. Default: scaling-results/<script or study file>-<mode>.",
    ),
    click.option(
        "--in-flight",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Jobs queued at a time.",
    ),
    click.option(
        "-y", "--yes", is_flag=True, help="Do not ask before submitting to a batch system."
    ),
    click.option(
        "--dry-run", is_flag=True, help="Print the plan and its cost; run and write nothing."
    ),
    click.option(
        "--example",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_example,
        help="Print a commented study file.",
    ),
    click.argument(
        "words",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="SCRIPT [ARGUMENTS]... | STUDY.yaml",
    ),
)

# Options that a study file has too, under these names, and how their text is read.
_WORDS = {
    "algorithms": "algorithms",
    "framework": "frameworks",
    "workload": "workloads",
    "filesystems": "filesystems",
}
_SAME = ("mode", "repeats", "epochs", "steps", "ranks_per_node", "walltime", "queue", "account")
_ALSO_SAME = ("max_node_hours", "pack", "batch_args", "target", "python")


def scale_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options and arguments."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


class Scale(click.Command):
    """A command whose options end at a script, but not at a study file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((Path(a) for a in args if Path(a).suffix in (".py", ".yaml", ".yml")), None)
        if first is not None and is_study_file(first):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class Asked:
    """What a study shall be, by the keys of a study file.

    Attributes:
        wishes: file and command line together; the latter wins.
        site: name of the site profile; None: this machine's.
        folder: what paths of scripts are relative to.
        name: what the study's folder is called by default.
        faults: of the options; the rest of the definition may have more.
    """

    wishes: Mapping[str, Any]
    site: str | None
    folder: Path
    name: str
    faults: tuple[str, ...] = ()


def asked(ctx: click.Context, words: tuple[str, ...]) -> Asked:
    """Put the study file and the options together.

    Raises:
        UsageError: nothing to train, or all faults of the file at once.
    """
    file = Path(words[0]) if words and is_study_file(Path(words[0])) else None
    given = {name: value for name, value in ctx.params.items() if value is not None}
    if file is None and not words and "workload" not in given:
        raise UsageError("nothing to train. Give a SCRIPT, a STUDY.yaml, or --workload NAME.")
    own, faults = _wishes(given)
    if file is not None:
        if len(words) > 1:
            raise UsageError(
                f"{words[1]!r} follows the study file, which takes no arguments. Put a script's "
                "arguments into its args."
            )
        wishes = {**read_study_file(file), **own}
        return Asked(
            wishes, own.get("site", wishes.get("site")), file.absolute().parent, file.stem, faults
        )
    if "workloads" in own:
        named = {**own, "args": list(words)}
        return Asked(named, own.get("site"), Path.cwd(), "-".join(own["workloads"]), faults)
    wishes = {**own, "scripts": [words[0]], "args": list(words[1:])}
    return Asked(wishes, own.get("site"), Path.cwd(), Path(words[0]).stem, faults)


def _wishes(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    faults: list[str] = []
    found = {name: given[name] for name in (*_SAME, *_ALSO_SAME, "site") if name in given}
    for option, key in _WORDS.items():
        if option in given:
            found[key] = [w for w in (w.strip() for w in given[option].split(",")) if w]
    if "network" in given:
        found["networks"] = split_networks(given["network"])
    for name, allowed in (("nodes", None), ("bits", BITS), ("batch_size", None)):
        if name in given:
            try:
                option = f"--{name.replace('_', '-')}"
                found[name] = parse_counts(given[name], option, allowed)
            except UsageError as error:
                faults += str(error).splitlines()
                found[name] = DEFAULTS[name]
    return found, tuple(faults)
