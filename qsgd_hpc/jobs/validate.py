"""Fill a request from the site's profile, and find all that is wrong with it at once. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.profile import Site
from qsgd_hpc.jobs.queues import pick, queue_faults
from qsgd_hpc.jobs.words import did_you_mean, listing

__all__ = ["Facts", "fill", "request_faults", "site_faults"]

# Directive lines have no quoting that every scheduler agrees on, so values stay within this set.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME_LENGTH = 15  # what PBS shows of a job's name
NODES_CEILING = 1_000_000


@dataclass(frozen=True)
class Facts:
    """What was seen on this machine before the check.

    Attributes:
        script_fault: why the script cannot be used, or None.
        near_scripts: names of scripts where the script was looked for.
        missing_command: the scheduler's submit command when it is not on PATH.
    """

    script_fault: str | None = None
    near_scripts: tuple[str, ...] = ()
    missing_command: str | None = None


def fill(
    request: JobRequest, site: Site, variables: Mapping[str, str | None] | None = None
) -> JobRequest:
    """Return the request with every open choice made: argument, environment, profile, default.

    Args:
        request: as the user gave it.
        site: the profile.
        variables: ``{"account": ...}`` from the environment, if set there.
    """
    account = request.account or (variables or {}).get("account") or site.default_account
    if account and site.account_suffix and not account.endswith(site.account_suffix):
        account += site.account_suffix
    walltime_min = request.walltime_min
    if walltime_min is None:
        walltime_min = site.default_walltime_min
    queue = request.queue or site.default_queue
    if queue is None and (picked := pick(site, request.nodes, walltime_min)):
        queue = picked.name
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = site.ranks_per_node or site.gpus or 1
    return dataclasses.replace(
        request,
        site=site.name,
        ranks_per_node=ranks_per_node,
        walltime_min=walltime_min,
        queue=queue,
        account=account,
        filesystems=request.filesystems or site.default_filesystems,
        name=request.name or _name_from(request.script.stem),
    )


def _name_from(stem: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", stem)[:NAME_LENGTH].strip("_.+-")
    return plain if plain[:1].isalpha() else f"job_{plain}"[:NAME_LENGTH].rstrip("_")


def request_faults(request: JobRequest, facts: Facts) -> list[str]:
    """Return the faults that need no profile to be seen."""
    return list(_request_faults(request, facts))


def _request_faults(request: JobRequest, facts: Facts) -> Iterator[str]:
    if facts.script_fault:
        near = did_you_mean(request.script.name, facts.near_scripts) if facts.near_scripts else ""
        yield f"{facts.script_fault} {near if near.startswith('Did') else ''}".rstrip()
    if not 1 <= request.nodes <= NODES_CEILING:
        yield f"--nodes {request.nodes}: a job needs at least 1 node. Use --nodes 1 or more."
    per_node = request.ranks_per_node
    if per_node is not None and per_node < 1:
        yield f"--ranks-per-node {per_node}: a node needs at least 1 rank. Leave it out or use 1."
    if request.walltime_min is not None and request.walltime_min <= 0:
        yield f"--walltime of {request.walltime_min:g} minutes: use a positive time, such as 30m."
    if request.name and not (_PLAIN_WORD.fullmatch(request.name) and request.name[0].isalpha()):
        yield (
            f"--name {request.name!r}: a job's name is letters, digits and _ . + - after a letter. "
            f"Try --name {_name_from(request.name)}."
        )
    for key, value in request.env.items():
        if not _VARIABLE.fullmatch(key):
            yield f"--env {key!r}: a name is letters, digits and _. Write --env NAME=VALUE."
        elif "\0" in value:
            yield f"--env {key}: the value holds a NUL byte, which no environment can carry."
    if any("\0" in word for word in (str(request.script), *request.script_args)):
        yield "the script or one of its arguments holds a NUL byte, which no command can carry."


def site_faults(request: JobRequest, site: Site, facts: Facts) -> list[str]:
    """Return every fault of a filled request on a site, each with its remedy; [] when it fits."""
    return list(_site_faults(request, site, facts))


def _site_faults(request: JobRequest, site: Site, facts: Facts) -> Iterator[str]:
    yield from queue_faults(site, request.queue, request.nodes, request.walltime_min)
    yield from _missing(request, site)
    if site.gpus and (request.ranks_per_node or 0) > site.gpus:
        yield (
            f"--ranks-per-node {request.ranks_per_node}: a node of {site.name} has {site.gpus} "
            f"GPUs, one for each rank. Use --ranks-per-node {site.gpus} or fewer."
        )
    for name in request.filesystems:
        if site.filesystems and name not in site.filesystems:
            yield f"{site.name} has no filesystem '{name}'. {did_you_mean(name, site.filesystems)}"
        elif not _PLAIN_WORD.fullmatch(name):
            yield f"--filesystems {name!r}: names are letters, digits and _ . + -"
    for flag, value in (("account", request.account), ("queue", request.queue)):
        if value and not _PLAIN_WORD.fullmatch(value):
            yield f"--{flag} {value!r}: a name is letters, digits and _ . + - here."
    if facts.missing_command:
        yield (
            f"{site.name} submits with {facts.missing_command}, which is not on PATH here. Log in "
            f"to {site.name}, or add --dry-run to see the script, or --site for another site."
        )


def _missing(request: JobRequest, site: Site) -> Iterator[str]:
    if "account" in site.required and not request.account:
        yield (
            f"{site.name} needs the account that pays. Use --account PROJECT, set QSGD_ACCOUNT, or "
            f"write defaults: {{account: PROJECT}} to $QSGD_HOME/sites/{site.name}.yaml."
        )
    if "walltime" in site.required and request.walltime_min is None:
        yield f"{site.name} needs a walltime. Use --walltime 30m."
    if "filesystems" in site.required and not request.filesystems:
        valid = listing(site.filesystems)
        yield (
            f"{site.name} needs the file systems that the job uses ({valid}). "
            f"Use --filesystems {','.join(site.filesystems) or 'NAME'}."
        )
