"""Check a profile against jobs/schema.json, then for what no schema can say; all faults at once."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from qsgd_hpc._data import data as shipped
from qsgd_hpc.jobs.words import did_you_mean, listing, minutes
from qsgd_hpc.jobs.yaml_lines import Document, Path

__all__ = ["LAUNCH_FIELDS", "profile_faults"]

# What {name} may stand for in launcher.argv and directives; render.py fills them in.
LAUNCH_FIELDS = (
    "nodes",
    "ranks",
    "ranks_per_node",
    "gpus",
    "depth",
    "cpus_per_rank",
    "python",
    "qsgd_hpc",
)


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(shipped("jobs").joinpath("schema.json").read_text("utf-8"))
    return schema


def profile_faults(document: Document, *, partial: bool = False) -> list[tuple[int, str]]:
    """Return every fault of a profile as (line, sentence), in the order of lines.

    Args:
        document: the parsed file.
        partial: an override of another profile; keys may be missing.
    """
    faults: list[tuple[int, str]] = []
    for error in Draft202012Validator(_schema()).iter_errors(document.data):
        if not (partial and error.validator == "required"):
            faults.extend(_sentences(error, document))
    if not faults and isinstance(document.data, dict):
        faults.extend((document.line(path), text) for path, text in _meaning(document.data))
    return sorted(faults)


def _sentences(error: ValidationError, document: Document) -> Iterator[tuple[int, str]]:
    path: Path = tuple(error.absolute_path)
    where = ".".join(str(part) for part in path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        valid = list(error.schema.get("properties", {})) if isinstance(error.schema, dict) else []
        for key in error.instance:
            if key not in valid:
                inside = f" in '{where}'" if where else ""
                yield (
                    document.line((*path, key)),
                    f"unknown key '{key}'{inside}. {did_you_mean(key, valid)}",
                )
    elif error.validator == "required" and isinstance(error.instance, dict):
        wanted_keys: Any = error.validator_value
        missing = [key for key in wanted_keys if key not in error.instance]
        # jsonschema reports each missing key on its own; name this error's key only.
        key = next(k for k in missing if error.message.startswith(repr(k)))
        yield document.line(path), f"key '{key}' is missing" + (f" in '{where}'" if where else "")
    else:
        wanted = error.schema.get("description") if isinstance(error.schema, dict) else None
        if wanted is None and error.parent is None:
            wanted = _parent_description(path)
        got = json.dumps(error.instance, ensure_ascii=False)
        hint = f" must be {wanted}" if wanted else f": {error.message}"
        yield document.line(path), f"'{where or 'profile'}'{hint}; it is {got}"


def _parent_description(path: Path) -> str | None:
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


def _meaning(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Find contradictions between values that are each well-formed."""
    queues: Mapping[str, Any] = data.get("queues", {})
    for name, queue in queues.items():
        path: Path = ("queues", name)
        if "nodes" in queue and queue["nodes"][0] > queue["nodes"][1]:
            yield (*path, "nodes"), f"queue '{name}' takes from {queue['nodes'][0]} nodes to fewer"
        if "walltime" in queue and minutes(queue["walltime"][0]) > minutes(queue["walltime"][1]):
            yield (*path, "walltime"), f"queue '{name}': the least walltime exceeds the most"
        for key in ("routes", "via"):
            named = queue.get(key, [])
            for other in [named] if isinstance(named, str) else named:
                if other not in queues:
                    yield (
                        (*path, key),
                        f"queue '{name}' names the unknown queue '{other}'. "
                        f"{did_you_mean(other, queues)}",
                    )
    default = data.get("defaults", {}).get("queue")
    if queues and default is not None and default not in queues:
        yield ("defaults", "queue"), f"unknown queue '{default}'. {did_you_mean(default, queues)}"
    yield from _gpu_order(data)
    launcher = data.get("launcher", {})
    for key, fields in (("argv", LAUNCH_FIELDS), ("env_argv", ("key", "value"))):
        for i, word in enumerate(launcher.get(key, [])):
            yield from _fields(word, fields, ("launcher", key, i))
    for i, word in enumerate(data.get("directives", [])):
        yield from _fields(word, LAUNCH_FIELDS, ("directives", i))


def _gpu_order(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    gpus, order = data.get("node", {}).get("gpus"), data.get("gpu", {}).get("order")
    if order is not None and gpus is not None and sorted(order) != list(range(gpus)):
        yield (
            ("gpu", "order"),
            f"GPU order {order} must name each of the node's {gpus} GPUs 0..{gpus - 1} once",
        )


def _fields(word: str, valid: tuple[str, ...], path: Path) -> Iterator[tuple[Path, str]]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(word) if name is not None]
    except ValueError as error:
        yield path, f"{word!r}: {error}. A literal brace is written twice."
        return
    for name in names:
        if name not in valid:
            wanted = listing([f"{{{field}}}" for field in valid])
            yield path, f"{word!r}: unknown field '{{{name}}}'. It may hold {wanted}."
