"""The options of ``qsgd-hpc scale``, combined with those of a study file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.files import parse_yaml
from qsgd_hpc.jobs.words import did_you_mean
from qsgd_hpc.launch.cluster.network import split as split_networks
from qsgd_hpc.scaling.define.definition import DEFAULTS
from qsgd_hpc.scaling.define.study import BITS, MODES, parse_counts

__all__ = ["Asked", "Scale", "asked", "scale_options"]


def _example(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(data("scaling").joinpath("studies/example.yaml").read_text("utf-8"), nl=False)
        ctx.exit()


OPTIONS = (
    click.option("--site", help="Site profile (see `qsgd-hpc sites`). Default: this machine's."),
    click.option("--nodes", help="Node counts to measure.  [default: 1,2]"),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="strong: constant global batch; weak: constant batch per rank.  [default: strong]",
    ),
    click.option(
        "--bits",
        help="Bits per gradient element: 8, 4, 2; 32: uncompressed.  [default: 32,8,4]",
    ),
    click.option("--algorithms", help="Allreduce algorithms to compare.  [default: auto]"),
    click.option(
        "--network",
        metavar="RATE[,latency=T],...",
        help="On this machine: emulate a host for each node, at each of these link rates, such as "
        "100mbit,1gbit; none: shared memory.",
    ),
    click.option(
        "--repeats",
        type=int,
        help="Measurements of each point; 3 or more show the noise.  [default: 1]",
    ),
    click.option(
        "--batch-size",
        help="Samples per step: global (strong) or per rank (weak); several are compared.  "
        "[default: 128]",
    ),
    click.option("--epochs", type=int, help="Passed to the script. Default: the script's own."),
    click.option("--steps", type=int, help="Passed to the script: number of steps of a run."),
    click.option(
        "--batch-args",
        help="The script's arguments for its batch size, such as '--bs {rank_batch}'; "
        "{global_batch} is that of all ranks; '' if it has none.  [default: --global-batch-size "
        "or --batch-size, by the mode]",
    ),
    click.option(
        "--target",
        type=float,
        help="Test accuracy (or perplexity, above 1); the time to reach it is reported.  "
        "[default: the value that fp32 reaches]",
    ),
    click.option("--workload", help="Workloads of this package, such as resnet34,mnist."),
    click.option(
        "--framework", help="Frameworks of the workloads: torch, keras.  [default: torch]"
    ),
    click.option("--ranks-per-node", type=int, help="Default: the site's, such as one per GPU."),
    click.option(
        "--walltime",
        help="Walltime of each job, such as 30m or 1h30m; a plain number is minutes. "
        "Default: the site's.",
    ),
    click.option("--queue", help="Queue of every job."),
    click.option("--account", help="Project to charge for the jobs."),
    click.option("--filesystems", help="File systems of the jobs, such as home,eagle."),
    click.option(
        "--python", help="Python interpreter for the scripts on the nodes; it needs qsgd_hpc."
    ),
    click.option(
        "--max-node-hours", type=float, help="Submit nothing if the study could cost more."
    ),
    click.option(
        "--pack/--separate",
        default=None,
        help="Run all points in one job of the largest size, or in a job each.  "
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
        help="Largest number of jobs queued at a time.",
    ),
    click.option(
        "-y", "--yes", is_flag=True, help="Do not ask before submitting to a batch system."
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and its cost without running it."),
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

# Options that are lists of words in a study file, and their names there.
_WORDS = {
    "algorithms": "algorithms",
    "framework": "frameworks",
    "workload": "workloads",
    "filesystems": "filesystems",
}


def scale_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add these options and arguments to a command."""
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
    """The requested study, with the keys of a study file.

    Attributes:
        settings: settings of the file and of the command line, which takes precedence.
        folder: the folder that paths of scripts are relative to.
        name: default name of the study's folder.
        faults: faults of the options; the rest of the definition may have more.
    """

    settings: Mapping[str, Any]
    folder: Path
    name: str
    faults: tuple[str, ...]


def asked(ctx: click.Context, words: tuple[str, ...]) -> Asked:
    """Combine the study file and the options.

    Raises:
        UsageError: there is nothing to train, or the file has faults; the message lists all.
    """
    file = Path(words[0]) if words and is_study_file(Path(words[0])) else None
    given = {name: value for name, value in ctx.params.items() if value is not None}
    if file is None and not words and "workload" not in given:
        raise UsageError("nothing to train. Give a SCRIPT, a STUDY.yaml or --workload NAME.")
    own, faults = _settings(given)
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
        folder, name = Path.cwd(), "-".join(own["workloads"])
    else:
        settings = {**own, "scripts": [words[0]], "args": list(words[1:])}
        folder, name = Path.cwd(), Path(words[0]).stem
    return Asked(settings, folder, name, faults)


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    faults: list[str] = []
    found = {name: value for name, value in given.items() if name in (*DEFAULTS, "site")}
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


Fault = tuple[tuple[str | int, ...], str]


def is_study_file(path: Path) -> bool:
    """Return whether a path names a study file, not a script."""
    return path.suffix in (".yaml", ".yml")


def read_study_file(path: Path) -> dict[str, Any]:
    """Return the settings of a study file, each of the right type.

    Raises:
        UsageError: it cannot be read, or has unknown keys or invalid values; the message lists all
            of them with their lines.
    """
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"study file {str(path)!r}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"study file {str(path)!r}: cannot be read: {error}.") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    faults = sorted((document.line(where), text) for where, text in study_faults(document.data))
    if faults:
        raise UsageError("\n".join(f"{path}, line {line}: {text}" for line, text in faults))
    settings: dict[str, Any] = document.data
    return settings


def study_faults(body: Any) -> Iterator[Fault]:
    """Yield every fault of a study file's data, with its path."""
    schema = json.loads(data("scaling").joinpath("study.schema.json").read_text("utf-8"))
    faults = False
    for error in Draft202012Validator(schema).iter_errors(body):
        faults = True
        yield from _sentences(error)
    if not faults and not (body.get("workloads") or body.get("scripts")):
        yield (), "nothing to train. Give 'workloads' or 'scripts'."


def _sentences(error: ValidationError) -> Iterator[Fault]:
    path = tuple(error.absolute_path)
    where = ".".join(str(part + 1) if isinstance(part, int) else part for part in path)
    schema = error.schema if isinstance(error.schema, dict) else {}
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        valid = list(schema.get("properties", {}))
        for key in error.instance:
            if key not in valid:
                inside = f" in '{where}'" if where else ""
                yield (*path, key), f"unknown key '{key}'{inside}. {did_you_mean(key, valid)}"
    elif error.validator == "required":
        missing = error.message.split("'")[1]
        yield path, f"key '{missing}' is missing in '{where}'"
    else:
        got = json.dumps(error.instance, ensure_ascii=False, default=str)
        wanted = schema.get("description", error.message)
        yield path, f"'{where or 'the file'}' must be {wanted}; it is {got}"
