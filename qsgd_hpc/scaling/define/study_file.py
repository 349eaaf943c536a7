"""Reading of a study file (YAML); all faults are reported together, with their lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.yaml_lines import parse
from qsgd_hpc.jobs.words import did_you_mean

__all__ = ["is_study_file", "read_study_file"]

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
        document = parse(path.read_text(encoding="utf-8"))
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
    schema = json.loads(shipped("scaling").joinpath("study.schema.json").read_text("utf-8"))
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
