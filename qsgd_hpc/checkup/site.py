"""The scheduler of this machine, and the profile that is chosen here."""

from __future__ import annotations

import shutil

from qsgd_hpc import env
from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import choose, load, names
from qsgd_hpc.jobs.sites.merge import dotted, merged, unconfirmed
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.sites.sources import package_faults
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["site"]


def site() -> list[Finding]:
    """Return the site chosen on this machine, and a fault for each invalid profile."""
    found = []
    try:
        found += _chosen(choose(None))
    except UsageError as error:
        found.append(fault("site", str(error), "See `qsgd-hpc sites list`."))
    for name in names():
        try:
            load(name)
        except UsageError as error:
            found.append(fault("profiles", str(error), "Correct that line of the file."))
    remedy = "Reinstall or remove that package."
    return found + [fault("profiles", text, remedy) for text in package_faults()]


def _chosen(here: Site) -> list[Finding]:
    command = SCHEDULERS[here.scheduler].command
    path = shutil.which(command) if command else None
    text = f"{here.name}: {here.description}" + (f"; {path}" if path else "")
    if here.generic:
        remedy = "Run `qsgd-hpc sites new NAME` to write a profile from the scheduler's answers."
        return [note("site", f"{text}: queues and GPUs are unknown", remedy)]
    if command and not path:
        remedy = f"Log in to {here.name}, or unset QSGD_SITE."
        return [fault("site", f"{text}; {command} is not on PATH", remedy)]
    found = [ok("site", text)]
    if marks := unconfirmed(merged(here.name)):
        words = ", ".join(map(dotted, marks))
        remedy = f"Run `qsgd-hpc sites check {here.name}` to compare it with the machine."
        found.append(note("site", f"not confirmed for {here.name}: {words}", remedy))
    if "account" in here.required and not (here.default_account or env.get("QSGD_ACCOUNT")):
        remedy = f"Set QSGD_ACCOUNT, or write defaults: {{account: PROJECT}} for {here.name}."
        found.append(note("site", "no account: submit needs --account", remedy))
    return found
