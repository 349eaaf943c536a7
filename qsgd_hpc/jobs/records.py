"""Requests and progress as the JSON of their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc.jobs.model import JobRequest, JobState, Progress

__all__ = ["progress_from_json", "progress_to_json", "request_from_json", "request_to_json"]

_PATHS = ("script", "workdir", "venv", "template")
_LISTS = ("script_args", "filesystems", "modules", "without", "after", "exclude", "extra")


def request_to_json(request: JobRequest) -> dict[str, Any]:
    """Return the content of request.json for a request."""
    plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    for name in _PATHS:
        plain[name] = None if plain[name] is None else str(plain[name])
    plain["env"] = dict(request.env)
    plain["array"] = {key: list(values) for key, values in request.array.items()}
    return plain


def request_from_json(fields: Mapping[str, Any]) -> JobRequest:
    """Return the request; keys missing in records of older versions get their defaults."""
    values = dict(fields)
    for name in _PATHS:
        values[name] = Path(values[name]) if values.get(name) is not None else None
    for name in _LISTS:
        values[name] = tuple(values.get(name, ()))
    values["array"] = {key: tuple(given) for key, given in values.get("array", {}).items()}
    return JobRequest(**values)


def progress_to_json(progress: Progress) -> dict[str, Any]:
    """Return the content of state.json."""
    fields = {**dataclasses.asdict(progress), "state": progress.state.value}
    del fields["silence"]
    return fields


def progress_from_json(fields: Mapping[str, Any] | None) -> Progress:
    """Return the progress; LOST if the state file is missing or damaged."""
    if fields is None:
        return Progress(JobState.LOST, why="its state file is missing or damaged")
    bad_nodes = tuple(fields.get("bad_nodes", ()))
    return Progress(**{**fields, "state": JobState(fields["state"]), "bad_nodes": bad_nodes})
