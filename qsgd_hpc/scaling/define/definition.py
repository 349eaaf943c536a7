"""Reading of study files, and conversion of settings to a checked definition of a study."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from qsgd_hpc._data import data
from qsgd_hpc.env import ALGORITHMS
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import JobRequest
from qsgd_hpc.jobs.request.validate import fill, network_faults
from qsgd_hpc.jobs.sites.files import parse_yaml
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import did_you_mean, listing, minutes
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.network import NONE
from qsgd_hpc.launch.command import usable_cores
from qsgd_hpc.scaling.define.study import BITS, Program, Study, equal_threads

__all__ = ["DEFAULTS", "define", "find_workload", "is_study_file", "read_study_file"]

FRAMEWORKS = ("torch", "keras")


@dataclass(frozen=True)
class Workload:
    """A script that trains one network in one framework.

    Attributes:
        script: the file to start.
        args: arguments of this workload; they precede all others.
        unit: the unit of its throughput, "images" or "words".
    """

    script: Path
    args: tuple[str, ...]
    unit: str


@cache
def _index() -> dict[str, dict[str, Any]]:
    text = data("scaling").joinpath("workloads", "index.yaml").read_text(encoding="utf-8")
    index: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return index


def workload_names(framework: str | None = None) -> tuple[str, ...]:
    """Return the workloads of this package for a framework, or all, in the index's order."""
    return tuple(n for n, row in _index().items() if framework is None or framework in row)


def find_workload(workload: str, framework: str) -> Workload:
    """Return a workload of this package.

    Raises:
        UsageError: there is none with this name, or not in this framework; the message lists the
            existing ones.
    """
    row = _index().get(workload)
    if row is None:
        names = workload_names()
        raise UsageError(
            f"workload {workload!r}: unknown. {did_you_mean(workload, names)} Workloads: "
            f"{', '.join(names)}; for your own script, give its path."
        )
    there = [each for each in FRAMEWORKS if each in row]
    if framework not in there:
        others = ", ".join(workload_names(framework))
        more = f" Workloads for {framework}: {others}." if framework in FRAMEWORKS else ""
        raise UsageError(
            f"workload {workload!r}: not for framework {framework!r}, only for "
            f"{listing(there, 'and')}.{more}"
        )
    file, *args = shlex.split(row[framework])
    script = data("scaling").joinpath("workloads", *file.split("/"))
    return Workload(Path(str(script)), tuple(args), row["unit"])


Settings = Mapping[str, Any]

DEFAULTS: Settings = {
    "workloads": [],
    "scripts": [],
    "frameworks": ["torch"],
    "args": [],
    "nodes": [1, 2],
    "mode": "strong",
    "bits": [32, 8, 4],
    "algorithms": ["auto"],
    "networks": [],
    "repeats": 1,
    "batch_size": 128,
    "epochs": None,
    "steps": None,
    "batch_args": None,
    "target": None,
    "ranks_per_node": None,
    "walltime": None,
    "queue": None,
    "account": None,
    "filesystems": [],
    "python": None,
    "max_node_hours": None,
    "pack": False,
}
"""Defaults of a study; the keys are those of a study file."""


def define(
    settings: Settings, folder: Path, site: Site, workdir: Path, known: Sequence[str] = ()
) -> Study:
    """Return the checked study that these settings describe.

    Args:
        settings: keys of a study file, each of the right type; see scaling/study.schema.json.
        folder: the folder that paths of scripts are relative to.
        site: the site.
        workdir: the folder in which its jobs run.
        known: faults found earlier, to be reported with the others.
    Raises:
        UsageError: all faults, one per line.
    """
    asked = {**DEFAULTS, **settings}
    faults = list(known)
    programs = list(_programs(asked, folder, faults))
    faults += _word_faults(asked)
    ranks_per_node = asked["ranks_per_node"]
    if ranks_per_node is None:
        ranks_per_node = fill(JobRequest(Path("x.py")), site).ranks_per_node or 1
    study = Study(
        programs=tuple(programs),
        workdir=workdir,
        mode=asked["mode"],
        nodes=tuple(sorted(set(asked["nodes"]))),
        bits=tuple(sorted(set(asked["bits"]), reverse=True)),
        algorithms=tuple(dict.fromkeys(asked["algorithms"])),
        networks=_networks(asked, site, faults),
        ranks_per_node=ranks_per_node,
        site=site.name,
        repeats=asked["repeats"],
        walltime_min=_minutes(asked["walltime"], faults),
        queue=asked["queue"],
        account=asked["account"],
        filesystems=tuple(asked["filesystems"]),
        python=asked["python"],
        max_node_hours=asked["max_node_hours"],
        pack=asked["pack"],
    )
    try:
        study.check()
    except UsageError as error:
        # After an unknown workload, which is a fault already, nothing may be left to train.
        faults += [f for f in str(error).splitlines() if not (faults and "nothing to train" in f)]
    if faults:
        raise UsageError("\n".join(dict.fromkeys(faults)))
    if site.scheduler == "local":
        study = dataclasses.replace(study, threads=equal_threads(usable_cores(), study))
    return study


def _programs(asked: Settings, folder: Path, faults: list[str]) -> Iterator[Program]:
    for own in _mappings(asked["scripts"], "script"):
        path = Path(os.path.abspath(folder / own["script"]))  # noqa: PTH100 (links stay as given)
        yield _program(own.get("name", path.stem), "", path, asked, own)
    for own in _mappings(asked["workloads"], "name"):
        frameworks: list[str] = own.get("frameworks") or asked["frameworks"]
        for framework in dict.fromkeys(frameworks):
            try:
                found = find_workload(own["name"], framework)
            except UsageError as error:
                faults.append(str(error))
                continue
            program = _program(own["name"], framework, found.script, asked, own)
            yield dataclasses.replace(program, args=(*found.args, *program.args))


def _mappings(entries: Sequence[str | Settings], key: str) -> list[dict[str, Any]]:
    return [{key: each} if isinstance(each, str) else dict(each) for each in entries]


def _program(name: str, framework: str, script: Path, asked: Settings, own: Settings) -> Program:
    both = {**asked, **own}
    batches = both["batch_size"]
    return Program(
        workload=name,
        framework=framework,
        script=script,
        args=(*map(str, asked["args"]), *map(str, own.get("args", ()))),
        batch_sizes=tuple(dict.fromkeys(batches if isinstance(batches, list) else [batches])),
        epochs=both["epochs"],
        steps=both["steps"],
        batch_args=None if both["batch_args"] is None else _split(both["batch_args"]),
        target=both["target"],
    )


def _split(batch_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(batch_args))
    except ValueError as error:
        raise UsageError(
            f"--batch-args {batch_args!r}: {error}. Close the quotes, such as "
            "'--bs {rank_batch} --tag \"a b\"'."
        ) from None


def _word_faults(asked: Settings) -> Iterator[str]:
    for name in asked["algorithms"]:
        if name not in ALGORITHMS:
            yield f"algorithm {name!r}: unknown. {did_you_mean(name, ALGORITHMS)}"
    for bits in asked["bits"]:
        if bits not in BITS:
            yield f"bits {bits}: expected {', '.join(map(str, BITS))}."


def _networks(asked: Settings, site: Site, faults: list[str]) -> tuple[str, ...]:
    """Return the networks in normal form, each once; add the faults of invalid ones."""
    found = []
    for text in asked["networks"]:
        request = JobRequest(Path("x.py"), nodes=max(asked["nodes"], default=1), network=text)
        if wrong := list(network_faults(request, site)):
            faults += wrong
            continue
        network = parse_network(text)
        found.append(NONE if network is None else network.text)
    return tuple(dict.fromkeys(found))


def _minutes(text: str | None, faults: list[str]) -> float | None:
    if text is None:
        return None
    try:
        return minutes(text)
    except UsageError as error:
        faults.append(str(error))
        return None


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
