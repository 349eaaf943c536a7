"""Check a profile against jobs/schema.json, then for contradictions; return all faults."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.words import did_you_mean, listing, minutes
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["LAUNCH_FIELDS", "Position", "overlaid", "profile_faults"]

# The keys and indices that lead to a value of a profile.
Position = tuple[str | int, ...]

# Valid names in {name} fields of launcher.argv and directives; jobs/script.py sets the values.
LAUNCH_FIELDS = (
    *("nodes", "ranks", "ranks_per_node", "gpus", "depth", "cpus_per_rank"),
    *("python", "qsgd_hpc", "label", "network"),
)


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(shipped("jobs").joinpath("schema.json").read_text("utf-8"))
    known = {"enum": [*SCHEDULERS], "description": f"one of {', '.join(SCHEDULERS)}"}
    schema["properties"]["scheduler"] = known
    return schema


def profile_faults(data: Any, *, partial: bool = False) -> list[tuple[Position, str]]:
    """Return every fault of a profile as (position in the data, sentence).

    Args:
        data: the content of the file.
        partial: whether it overrides or extends another profile; keys may be missing, or null
            to unset the other's values.
    """
    check = Draft202012Validator(_schema()).iter_errors
    errors = list(check(data))
    if partial and isinstance(data, dict):
        unknown = [e for e in errors if e.validator == "additionalProperties"]
        data = overlaid({}, data)
        errors = [*unknown, *(e for e in check(data) if e.validator != "required")]
    faults = list(dict.fromkeys(fault for error in errors for fault in _sentences(error)))
    if not faults and isinstance(data, dict):
        faults.extend(_contradictions(data, partial))
    return faults


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return data overridden by other data: mappings key by key; null removes a key."""
    result = dict(below)
    for key, value in above.items():
        old = result.pop(key, None)
        if isinstance(value, dict):
            value = overlaid(old if isinstance(old, dict) else {}, value)
        if value is not None:
            result[key] = value
    return result


def _sentences(error: ValidationError) -> Iterator[tuple[Position, str]]:
    path: Position = tuple(error.absolute_path)
    where = ".".join(str(part) for part in path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        valid = list(error.schema.get("properties", {})) if isinstance(error.schema, dict) else []
        for key in error.instance:
            if key not in valid:
                inside = f" in '{where}'" if where else ""
                yield (*path, key), f"unknown key '{key}'{inside}. {did_you_mean(key, valid)}"
    elif error.validator == "required":
        key = error.message.split("'")[1]  # jsonschema reports each missing key separately
        yield path, f"key '{key}' is missing" + (f" in '{where}'" if where else "")
    else:
        wanted = error.schema.get("description") if isinstance(error.schema, dict) else None
        if wanted is None and error.parent is None:
            wanted = _parent_description(path)
        got = json.dumps(error.instance, ensure_ascii=False)
        hint = f" must be {wanted}" if wanted else f": {error.message}"
        yield path, f"'{where or 'profile'}'{hint}; it is {got}"


def _parent_description(path: Position) -> str | None:
    """Describe an item by the nearest described schema above it."""
    found, schema = None, _schema()
    for part in path:
        if isinstance(part, int):
            break
        schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties") or {}
        if "$ref" in schema:
            target = _schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]]
            schema = {**target, **schema}
        found = schema.get("description", found)
    return found


def _contradictions(data: Mapping[str, Any], partial: bool) -> Iterator[tuple[Position, str]]:
    """Find contradictions between valid values."""
    queues: Mapping[str, Any] = data.get("queues", {})
    for name, queue in queues.items():
        yield from _ranges(name, queue)
    if not partial:  # it may name queues that the other profile defines
        yield from _named_queues(data, queues)
    marks = data.get("verify")
    for i, key in enumerate(marks if isinstance(marks, list) else []):
        if key not in (valid := _schema()["properties"]):
            yield ("verify", i), f"unknown key '{key}' in 'verify'. {did_you_mean(key, valid)}"
    yield from _gpu_order(data)
    yield from _emulated(data)
    launcher = data.get("launcher", {})
    for i, word in enumerate(launcher.get("argv", [])):
        yield from _fields(word, ("launcher", "argv", i))
    for i, word in enumerate(data.get("directives", [])):
        yield from _fields(word, ("directives", i))


def _emulated(data: Mapping[str, Any]) -> Iterator[tuple[Position, str]]:
    network = data.get("network")
    if not isinstance(network, str):
        return
    if data.get("scheduler", "local") != "local":
        yield (
            ("network",),
            "a rate alone is for the local scheduler only; a cluster has its own network",
        )
    try:
        parse_network(network, "network:")
    except UsageError as error:
        for line in str(error).splitlines():
            yield ("network",), line


def _ranges(name: str, queue: Mapping[str, Any]) -> Iterator[tuple[Position, str]]:
    path: Position = ("queues", name)
    nodes, walltime = queue.get("nodes"), queue.get("walltime")
    if nodes and nodes[0] > nodes[1]:
        yield (
            (*path, "nodes"),
            f"queue '{name}': the least number of nodes, {nodes[0]}, exceeds the most",
        )
    if walltime and minutes(walltime[0]) > minutes(walltime[1]):
        yield (*path, "walltime"), f"queue '{name}': the least walltime exceeds the most"
    above = 0
    for i, (low, high, _) in sorted(enumerate(queue.get("bins", ())), key=lambda pair: pair[1]):
        if low > high:
            yield (
                (*path, "bins", i),
                f"queue '{name}': the least number of nodes of a bin, {low}, exceeds the most",
            )
        elif low <= above:
            yield (*path, "bins", i), f"queue '{name}': two bins contain {low} nodes"
        elif nodes and not nodes[0] <= low <= high <= nodes[1]:
            yield (
                (*path, "bins", i),
                f"queue '{name}': its bin of {low} to {high} nodes exceeds its nodes {nodes}",
            )
        above = max(above, high)


def _named_queues(
    data: Mapping[str, Any], queues: Mapping[str, Any]
) -> Iterator[tuple[Position, str]]:
    """Find names of queues that the profile does not define."""
    for name, queue in queues.items():
        for key in ("routes", "via"):
            named = queue.get(key, [])
            for other in [named] if isinstance(named, str) else named:
                if other not in queues:
                    yield (
                        ("queues", name, key),
                        f"queue '{name}' names the unknown queue '{other}'. "
                        f"{did_you_mean(other, queues)}",
                    )
    default = data.get("defaults", {}).get("queue")
    if queues and default is not None and default not in queues:
        yield ("defaults", "queue"), f"unknown queue '{default}'. {did_you_mean(default, queues)}"


def _gpu_order(data: Mapping[str, Any]) -> Iterator[tuple[Position, str]]:
    gpus, order = data.get("node", {}).get("gpus"), data.get("gpu", {}).get("order")
    if order is None or gpus is None:
        return
    # Tiles are written as GPU.TILE. If ranks use tiles, `gpus` is the number of tiles.
    named = [str(device) for device in order]
    if len(set(named)) != len(named) or len(named) != gpus:
        yield ("gpu", "order"), f"GPU order {order} must name each of the node's {gpus} GPUs once"
    elif all(name.isdigit() for name in named) and sorted(map(int, named)) != list(range(gpus)):
        yield ("gpu", "order"), f"GPU order {order} must hold the numbers 0 to {gpus - 1}"


def _fields(word: str, path: Position) -> Iterator[tuple[Position, str]]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(word) if name is not None]
    except ValueError as error:
        yield path, f"{word!r}: {error}. A literal brace is written twice."
        return
    for name in names:
        if name not in LAUNCH_FIELDS:
            wanted = listing([f"{{{field}}}" for field in LAUNCH_FIELDS])
            yield path, f"{word!r}: unknown field '{{{name}}}'. Valid fields: {wanted}."
