"""Check a profile: its files, unconfirmed facts, and differences from the machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs.sites import live
from qsgd_hpc.jobs.sites.build import build
from qsgd_hpc.jobs.sites.choice import Host, is_login_host, load
from qsgd_hpc.jobs.sites.live.compare import Difference, differences
from qsgd_hpc.jobs.sites.merge import Merged, dotted, merged, unconfirmed
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.sites.sources import names

__all__ = ["Report", "examine"]


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        fault: why the profile cannot be used, else empty.
        compared: the source of the comparison, or why there was none.
        differs: one row for each difference: fact, profile, machine, position of the change.
    """

    name: str
    fault: str = ""
    unconfirmed: tuple[tuple[str, str], ...] = ()
    compared: str = ""
    differs: tuple[Mapping[str, str], ...] = ()

    @property
    def is_sound(self) -> bool:
        """Return whether no change is needed."""
        return not self.fault and not self.differs

    def as_json(self) -> dict[str, Any]:
        """Return the report for --json."""
        marks = [{"fact": fact, "where": where} for fact, where in self.unconfirmed]
        return {
            "name": self.name,
            "fault": self.fault,
            "unconfirmed": marks,
            "compared": self.compared,
            "differs": [dict(row) for row in self.differs],
        }


def examine(name: str, host: Host, *, ask_machine: bool = True) -> Report:
    """Check one profile; on the machine that it describes, compare it with the scheduler, too."""
    try:
        found = merged(name)
    except UsageError as error:
        return Report(name, fault=str(error))
    marks = tuple((dotted(path), str(found.origin(path))) for path in unconfirmed(found))
    site = build(name, found.data)
    reason = _no_comparison(site, host) if ask_machine else "not compared with the machine"
    if reason:
        return Report(name, unconfirmed=marks, compared=reason)
    try:
        machine = live.look(site.scheduler)
    except LaunchError as error:
        return Report(name, unconfirmed=marks, compared=f"not compared: {error}")
    rows = tuple(_row(found, each) for each in differences(site, machine))
    said = f"compared with {live.ASKED[site.scheduler]} on this machine"
    if machine.unanswered:
        said += "; incomplete: " + "; ".join(machine.unanswered)
    return Report(name, unconfirmed=marks, compared=said, differs=rows)


def _row(found: Merged, difference: Difference) -> dict[str, str]:
    where = f"{found.origin(difference.path)}: {difference.change}"
    return {
        "fact": dotted(difference.path),
        "profile": difference.profile,
        "machine": difference.machine,
        "change": where,
    }


def _no_comparison(site: Site, host: Host) -> str:
    """Return why the profile cannot be compared with this machine, else an empty text."""
    command = live.ASKED.get(site.scheduler)
    if command is None or site.generic:
        return "not compared: it describes no machine with queues"
    if not shutil.which(command):
        return f"not compared: there is no {command} here; run this on {site.name}"
    if not is_login_host(site, host):
        for other in names():
            try:
                known = other != site.name and is_login_host(load(other), host)
            except UsageError:
                continue
            if known:
                return f"not compared: this is a login host of {other}"
    return ""
