"""Site profiles: the queues, nodes, launcher and settings of each machine, as data.

The profile of a job is chosen by name, QSGD_SITE, login host or scheduler, in this order.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.schedulers.common import ask
from qsgd_hpc.jobs.sites.files import merged, names, package_faults
from qsgd_hpc.jobs.sites.profile import Site, build
from qsgd_hpc.jobs.words import listing
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["Host", "choose", "find_host", "is_login_host", "load", "names", "serves", "usable"]

_SLURM_CONF = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))


def load(name: str) -> Site:
    """Read a profile with all that overrides it.

    Raises:
        UsageError: unknown name, or the profile's faults, each with its file, line and key.
    """
    return build(name, merged(name).data)


@dataclass(frozen=True)
class Host:
    """The facts that determine the site: this host's names, variables and schedulers."""

    host_names: tuple[str, ...]
    variables: Mapping[str, str]
    schedulers: tuple[str, ...]


def find_host() -> Host:
    """Inspect this machine."""
    return Host(
        host_names=(socket.gethostname(), socket.getfqdn()),
        variables=dict(os.environ),
        schedulers=tuple(filter(serves, SCHEDULERS)),
    )


def serves(scheduler: str) -> bool:
    """Return whether jobs can be submitted here; Slurm's commands alone are not sufficient."""
    command = SCHEDULERS[scheduler].command
    if not command or shutil.which(command) is None:
        return False
    if scheduler != "slurm" or "SLURM_CONF" in os.environ:
        return True
    return any(path.is_file() for path in _SLURM_CONF) or ask(["scontrol", "ping"]).code == 0


def choose(asked: str | None, host: Host | None = None) -> Site:
    """Return the requested site, that of QSGD_SITE, or that of this host.

    A scheduler on a host without a profile gets the generic profile of that scheduler, and a
    machine without one the embedded default. Without ``host`` this machine is inspected, but only
    if no site is set: querying a scheduler takes time.

    Raises:
        UsageError: unknown or malformed profile, or a scheduler that no profile fits.
    """
    name = asked or env.get("QSGD_SITE", os.environ if host is None else host.variables)
    if name:
        return load(name)
    host = host or find_host()
    sites, broken = usable()
    for site in sites.values():
        if is_login_host(site, host):
            return site
    for scheduler in host.schedulers:
        for site in sites.values():
            if site.generic and site.scheduler == scheduler:
                return site
    if host.schedulers:
        commands = listing(dict.fromkeys(SCHEDULERS[s].command for s in host.schedulers), "and")
        lines = [
            f"this host ({host.host_names[0]}) has {commands}, but no site profile matches it. "
            f"Choose one with --site or QSGD_SITE: {', '.join(sites)}; or write one, "
            "sites/NAME.yaml in QSGD_HOME (jobs/README.md)."
        ]
        raise UsageError("\n".join(lines + broken))
    for site in sites.values():
        if site.embedded_default:
            return site
    raise UsageError("\n".join(["no site profile is marked embedded_default: true", *broken]))


def usable() -> tuple[dict[str, Site], list[str]]:
    """Return the profiles without fault by name, and the faults of the others."""
    sites, broken = {}, package_faults()
    for each in names():
        try:
            sites[each] = load(each)
        except UsageError as error:
            broken.append(str(error))
    return sites, broken


def is_login_host(site: Site, host: Host) -> bool:
    """Return whether the host's name or its variables are those of the site."""
    if any(fnmatch.fnmatch(h, pattern) for pattern in site.login_hosts for h in host.host_names):
        return True
    wanted = site.login_env.items()
    return bool(wanted) and all(host.variables.get(key) == value for key, value in wanted)
