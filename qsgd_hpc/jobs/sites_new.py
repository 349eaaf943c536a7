"""Write a draft of a profile for a machine without one."""

from __future__ import annotations

import re
import shutil

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import live
from qsgd_hpc.jobs.live.draft import draft
from qsgd_hpc.jobs.sites import Host, home, load, names
from qsgd_hpc.jobs.sources import sources
from qsgd_hpc.jobs.words import listing

__all__ = ["new_profile"]


def new_profile(name: str, scheduler: str | None, host: Host, *, force: bool) -> str:
    """Return the YAML of a new profile.

    Args:
        name: name of the site; it must be new, unless ``force``.
        scheduler: the scheduler to query; None: none was found.
        host: this machine.
        force: replace the user's file of that name.

    Raises:
        UsageError: the name exists or is invalid, or there is no scheduler.
        LaunchError: the scheduler does not answer.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name):
        raise UsageError(
            f"{name!r} is not a valid name of a site: use letters, digits and _ . + -, "
            "beginning with a letter or digit."
        )
    _refuse_taken(name, force)
    if scheduler is None:
        commands = listing(live.ASKED.values(), "nor")
        raise UsageError(
            f"there is no scheduler here (neither {commands} on PATH). Run this on the machine's "
            "login host, or add --scheduler to get an empty profile to fill in."
        )
    here = shutil.which(live.ASKED[scheduler]) is not None
    found = live.look(scheduler) if here else live.Live(scheduler)
    return draft(name, found, _generic(scheduler), host.host_names[0] if here else None)


def _refuse_taken(name: str, force: bool) -> None:
    own = home() / "sites" / f"{name}.yaml"
    if own.exists() and not force:
        raise UsageError(f"{own} is there already. Use another name, or --force to replace it.")
    layers = {source.layer for source in sources(name)} - {"user"}
    if layers and not force:
        raise UsageError(
            f"site '{name}' is there already ({', '.join(sorted(layers))}): `qsgd-hpc sites check "
            f"{name}` compares it with the machine. Use another name, or --force to override it."
        )


def _generic(scheduler: str) -> str:
    for name in names():
        try:
            site = load(name)
        except UsageError:
            continue
        if site.generic and site.scheduler == scheduler:
            return name
    raise UsageError(f"no profile is marked generic: true for {scheduler}")
