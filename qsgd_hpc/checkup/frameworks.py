"""Frameworks by their metadata: none is imported, because that is slow and may start a GPU."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import qsgd_hpc
from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.checkup.installation import REINSTALL
from qsgd_hpc.launch.frameworks import FRAMEWORKS, Framework

__all__ = ["frameworks"]


def frameworks() -> list[Finding]:
    """Return the installed frameworks, with faults for old versions and missing bindings."""
    found = [_finding(each) for each in FRAMEWORKS]
    there = [finding for finding in found if finding is not None]
    return there or [
        note(
            "frameworks",
            "none is installed; qsgd_hpc.arrays needs none",
            "Run `pip install 'qsgd-hpc[torch]'`, or [tensorflow], [keras] or [jax].",
        )
    ]


def _finding(framework: Framework) -> Finding | None:
    name, extra, binding = framework.title, framework.module, framework.binding
    has = _version(framework.distributions or (framework.module,))
    if has is None:
        return None
    least = _least(extra)
    if least and _numbers(has) < _numbers(least):
        remedy = f"Run `pip install 'qsgd-hpc[{extra}]'`."
        return fault(name, f"{has} is older than {least}, the oldest supported version", remedy)
    if not binding:
        return ok(name, f"{has}, supported by the compiled core")
    file = next(
        (f for suffix in EXTENSION_SUFFIXES if (f := _file(binding, suffix)).exists()), None
    )
    if file is None:
        return fault(name, f"{has}, but qsgd_hpc/{binding} was not built", REINSTALL)
    return ok(name, f"{has}, {file}")


def _file(binding: str, suffix: str) -> Path:
    return Path(qsgd_hpc.__file__).parent / f"{binding}{suffix}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _least(extra: str) -> str | None:
    """Return the least version required by the metadata of this package."""
    try:
        rows = requires("qsgd-hpc") or []
    except PackageNotFoundError:
        return None
    pattern = rf"""{extra}[>=]=([\d.]+)\s*;.*extra == ['"]{extra}['"]"""
    return next((match[1] for row in rows if (match := re.match(pattern, row))), None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
