"""Find, read and choose site profiles: shipped ones, and the user's in $QSGD_HOME/sites."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsgd_hpc import env
from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.check import profile_faults
from qsgd_hpc.jobs.profile import Site, build
from qsgd_hpc.jobs.words import did_you_mean, listing
from qsgd_hpc.jobs.yaml_lines import Document, parse

__all__ = ["Host", "choose", "find_host", "home", "load", "names", "sources"]

# The command that submits to each scheduler; its presence tells that the machine has one.
SUBMIT_COMMANDS = {"pbs": "qsub", "slurm": "sbatch"}


def home() -> Path:
    """Return $QSGD_HOME, where jobs and the user's profiles are kept."""
    return Path(env.get("QSGD_HOME")).expanduser().absolute()


def sources(name: str) -> list[tuple[str, str]]:
    """Return (where, text) of each file that makes up a profile, shipped first; [] if unknown."""
    found: list[tuple[str, str]] = []
    packaged = shipped("jobs").joinpath(f"{name}.yaml")
    if packaged.is_file():
        found.append((str(packaged), packaged.read_text("utf-8")))
    own = home() / "sites" / f"{name}.yaml"
    if own.is_file():
        try:
            found.append((str(own), own.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"site '{name}': cannot read {own}: {error}") from None
    return found


def names() -> list[str]:
    """Return the names of all profiles, sorted."""
    found = {Path(f.name).stem for f in shipped("jobs").iterdir() if f.name.endswith(".yaml")}
    own = home() / "sites"
    if own.is_dir():
        found |= {path.stem for path in own.glob("*.yaml")}
    return sorted(found)


def load(name: str) -> Site:
    """Read a profile; a user's file of the same name overrides the shipped one key by key.

    Raises:
        UsageError: unknown name, or the profile's faults, each with its line and key.
    """
    # The name becomes part of job ids and of file names.
    parts = sources(name) if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name) else []
    if not parts:
        raise UsageError(f"unknown site '{name}'. {did_you_mean(name, names())}")
    merged: dict[str, Any] = {}
    for i, (where, text) in enumerate(parts):
        document = _checked(name, where, text, partial=i > 0)
        merged = _overlay(merged, document.data)
        if i > 0:
            _raise_faults(name, where, profile_faults(Document(merged, document.lines)))
    return build(name, merged)


def _checked(name: str, where: str, text: str, *, partial: bool) -> Document:
    try:
        document = parse(text)
    except UsageError as error:
        raise UsageError(f"site '{name}', {error} (in {where})") from None
    _raise_faults(name, where, profile_faults(document, partial=partial))
    return document


def _raise_faults(name: str, where: str, faults: list[tuple[int, str]]) -> None:
    if faults:
        raise UsageError(
            "\n".join(f"site '{name}', line {line}: {text} (in {where})" for line, text in faults)
        )


def _overlay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the keys of ``above``; mappings merge, everything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _overlay(old, value)
        result[key] = value
    return result


@dataclass(frozen=True)
class Host:
    """What the choice of a site depends on: this host's names, variables and schedulers."""

    host_names: tuple[str, ...]
    variables: Mapping[str, str]
    schedulers: tuple[str, ...]


def find_host() -> Host:
    """Look at this machine."""
    return Host(
        host_names=(socket.gethostname(), socket.getfqdn()),
        variables=dict(os.environ),
        schedulers=tuple(s for s, command in SUBMIT_COMMANDS.items() if shutil.which(command)),
    )


def choose(asked: str | None, host: Host) -> Site:
    """Return the site: asked for, from QSGD_SITE, by this login host, else the embedded default.

    Raises:
        UsageError: unknown or malformed profile, or a scheduler on a host that no profile knows.
    """
    name = asked or env.get("QSGD_SITE", host.variables)
    if name:
        return load(name)
    sites, broken = {}, []
    for each in names():
        try:
            sites[each] = load(each)
        except UsageError as error:
            broken.append(str(error))
    for site in sites.values():
        if _is_login_host(site, host):
            return site
    if host.schedulers:
        commands = listing([SUBMIT_COMMANDS[s] for s in host.schedulers], "and")
        lines = [
            f"this host ({host.host_names[0]}) has {commands}, but no site profile names it. "
            f"Choose one with --site or QSGD_SITE: {', '.join(sites)}."
        ]
        raise UsageError("\n".join(lines + broken))
    for site in sites.values():
        if site.embedded_default:
            return site
    raise UsageError("\n".join(["no site profile is marked embedded_default: true", *broken]))


def _is_login_host(site: Site, host: Host) -> bool:
    if any(fnmatch.fnmatch(h, pattern) for pattern in site.login_hosts for h in host.host_names):
        return True
    wanted = site.login_env.items()
    return bool(wanted) and all(host.variables.get(key) == value for key, value in wanted)
