"""Fill a request from the site's profile, and find all its faults. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.sites.queues import AUTO, crowd_fault, limit_words, pick, queue_faults, remark
from qsgd_hpc.jobs.words import did_you_mean, listing
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.network import MOST_HOSTS

__all__ = [
    "Facts",
    "fill",
    "network_faults",
    "request_faults",
    "site_faults",
    "site_notes",
]

# Schedulers do not agree on quotes in directive lines, so these characters only are allowed.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# Slurm accepts every name, but a directive line cannot quote what a shell would expand.
_NAME, _SLURM_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*"), re.compile(r"[!%&(-\[\]^_a-~]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PBS_NAME_LENGTH = 15  # characters of a job's name that PBS shows
NODES_CEILING = 1_000_000


@dataclass(frozen=True)
class Facts:
    """The state of this machine before the check.

    Attributes:
        script_fault: why the script cannot be used, or None.
        near_scripts: names of scripts in the searched folder.
        missing_command: the scheduler's submit command, if it is not on PATH.
        folder_faults: the faults of the request's folders.
    """

    script_fault: str | None = None
    near_scripts: tuple[str, ...] = ()
    missing_command: str | None = None
    folder_faults: tuple[str, ...] = ()


def fill(
    request: JobRequest, site: Site, variables: Mapping[str, str | None] | None = None
) -> JobRequest:
    """Return the request with all defaults filled in: argument, environment, profile, default.

    Args:
        request: the user's request.
        site: the profile.
        variables: ``{"account": ...}`` from the environment, if set there.
    """
    # That of the environment is meant for batch jobs; one given for this machine is noted.
    known = {} if site.scheduler == "local" else variables or {}
    account = request.account or known.get("account") or site.default_account
    if account and site.account_suffix and not account.endswith(site.account_suffix):
        account += site.account_suffix
    walltime_min = request.walltime_min
    if walltime_min is None:
        walltime_min = site.default_walltime_min
    queue = request.queue or site.default_queue
    if queue == AUTO and AUTO not in site.queues:
        queue = None
    if queue is None and (picked := pick(site, request.nodes, walltime_min)):
        queue = picked.name
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        ranks_per_node = site.ranks_per_node or site.at(queue).gpus or 1
    return dataclasses.replace(
        request,
        site=site.name,
        ranks_per_node=ranks_per_node,
        walltime_min=walltime_min,
        queue=queue,
        account=account,
        network=request.network or site.emulated_network,
        filesystems=request.filesystems or site.default_filesystems,
        name=request.name or _name_from(request.script.stem, site.scheduler),
    )


def _name_from(words: str, scheduler: str) -> str:
    """Return a name made of these words that every scheduler accepts and PBS shows completely."""
    longest = PBS_NAME_LENGTH if scheduler == "pbs" else None
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", words)[:longest].strip("_.+-")
    return plain if plain[:1].isalpha() else f"job_{plain}"[:longest].rstrip("_")


def request_faults(request: JobRequest, facts: Facts) -> list[str]:
    """Return the faults that do not depend on a profile."""
    return list(_request_faults(request, facts))


def _request_faults(request: JobRequest, facts: Facts) -> Iterator[str]:
    if facts.script_fault:
        near = did_you_mean(request.script.name, facts.near_scripts) if facts.near_scripts else ""
        yield f"{facts.script_fault} {near if near.startswith('Did') else ''}".rstrip()
    if not 1 <= request.nodes <= NODES_CEILING:
        yield f"--nodes {request.nodes}: a job has 1 to {NODES_CEILING} nodes. Use such a number."
    per_node = request.ranks_per_node
    if per_node is not None and per_node < 1:
        yield (
            f"--ranks-per-node {per_node}: a node needs at least 1 rank. Remove the option, "
            "or use 1."
        )
    if request.walltime_min is not None and request.walltime_min <= 0:
        yield f"--walltime of {request.walltime_min:g} minutes: use a positive time, such as 30m."
    for key, value in request.env.items():
        if not _VARIABLE.fullmatch(key):
            yield (
                f"--env {key!r}: a name may contain letters, digits and _. Write --env NAME=VALUE."
            )
        elif "\0" in value:
            yield (
                f"--env {key}: the value contains a NUL byte, which is not possible in an "
                "environment."
            )
    if request.horovod and not request.is_python:
        yield (
            f"--horovod is for Python scripts, but {request.script} is executed directly. Use a "
            "script that ends in .py, or add --python."
        )
    if any("\0" in word for word in (str(request.script), *request.script_args)):
        yield (
            "the script or one of its arguments contains a NUL byte, which is not possible "
            "in a command."
        )


def site_faults(request: JobRequest, site: Site, facts: Facts) -> list[str]:
    """Return every fault of a filled request on a site, with its remedy; [] if there are none."""
    return list(_site_faults(request, site, facts))


def _name_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    slurm = scheduler == "slurm"
    if request.name and not (_SLURM_NAME if slurm else _NAME).fullmatch(request.name):
        plain = "letters, digits and _ . + - after a letter"
        rule = "printable ASCII without spaces, quotes, $, # and backslashes" if slurm else plain
        yield (
            f"--name {request.name!r}: a job's name is {rule} here. "
            f"Try --name {_name_from(request.name, scheduler)}."
        )


def _site_faults(request: JobRequest, site: Site, facts: Facts) -> Iterator[str]:
    yield from _name_faults(request, site.scheduler)
    yield from queue_faults(site, request.queue, request.nodes, request.walltime_min)
    yield from _missing(request, site)
    yield from _array_and_chain(request, site)
    yield from _gpus(request, site)
    yield from _libraries(request, site)
    yield from network_faults(request, site)
    for name in request.filesystems:
        if site.filesystems and name not in site.filesystems:
            yield f"{site.name} has no filesystem '{name}'. {did_you_mean(name, site.filesystems)}"
        elif not _PLAIN_WORD.fullmatch(name):
            yield f"--filesystems {name!r}: names may contain letters, digits and _ . + -"
    account = _SLURM_NAME if site.scheduler == "slurm" else _PLAIN_WORD
    for flag, value, rule in (
        ("account", request.account, account),
        ("queue", request.queue, _PLAIN_WORD),
    ):
        if value and not rule.fullmatch(value):
            yield f"--{flag} {value!r}: a name may contain letters, digits and _ . + - here."
    if facts.missing_command:
        yield (
            f"{site.name} submits with {facts.missing_command}, which is not on PATH here. Log in "
            f"to {site.name}, or add --dry-run to see the script, or --site for another site."
        )


def _array_and_chain(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield violations of the queue's rules on arrays and on job dependencies."""
    queue = site.queues.get(request.queue or "")
    if queue is None:
        return
    what = f"{site.queue_kind} '{queue.name}' of {site.name}"
    most = queue.array_at_once
    if most and request.array and (request.at_once is None or request.at_once > most):
        yield f"{what} runs at most {most} tasks of an array at a time. Use --at-once {most}."
    if not queue.chain and (request.chain > 1 or request.after):
        flag = "--chain" if request.chain > 1 else "--after"
        others = [
            q.name
            for q in site.queues.values()
            if q.chain and not q.via and q.takes(request.nodes, request.walltime_min)
        ]
        remedy = f", or use --queue {listing(others)}" if others else ""
        yield f"{what} does not allow job dependencies. Remove {flag}{remedy}."
    elif fault := crowd_fault(
        site, queue, request.chain, len(request.tasks), request.nodes, request.walltime_min
    ):
        yield fault


def _gpus(request: JobRequest, site: Site) -> Iterator[str]:
    own = site.at(request.queue)
    where = f"of {site.name}" + ("" if own is site else f" in {site.queue_kind} {request.queue}")
    if own.gpus and (request.ranks_per_node or 0) > own.gpus:
        yield (
            f"--ranks-per-node {request.ranks_per_node}: a node {where} has {own.gpus} "
            f"GPUs, one for each rank. Use --ranks-per-node {own.gpus} or fewer."
        )
    view = request.gpu_view
    if view is None:
        return
    if view not in ("all", "one"):
        yield f"--gpu-view {view!r}: use all or one. {did_you_mean(view, ('all', 'one'))}"
    elif not own.gpus or own.gpu is None:
        yield f"--gpu-view {view}: the profile lists no GPUs {where}. Remove --gpu-view."
    elif own.gpu.bound_by == "launcher" and view != own.gpu.view:
        yield (
            f"--gpu-view {view}: the launcher of {site.name} shows each rank "
            f"{'its own GPU alone' if own.gpu.view == 'one' else 'every GPU'}. Remove "
            "--gpu-view."
        )


def _libraries(request: JobRequest, site: Site) -> Iterator[str]:
    known = [each.name for each in site.libraries]
    for name in request.without:
        if name not in known:
            has = (
                did_you_mean(name, known)
                if known
                else f"{site.name} has no settings for libraries."
            )
            yield f"--without {name}: no library of the profile has this name. {has}"


def site_notes(request: JobRequest, site: Site) -> list[str]:
    """Return notes on a filled request for the user: limits, guesses."""
    return list(_site_notes(request, site))


def _site_notes(request: JobRequest, site: Site) -> Iterator[str]:
    if site.retired:
        yield f"{site.name} was retired: {site.retired}."
    if site.generic:
        yield (
            f"site '{site.name}' is the generic profile for {site.scheduler}, without the queues "
            "and GPUs of this machine. `qsgd-hpc sites new NAME` writes a profile from the "
            "scheduler's information; --site selects another."
        )
    if request.queue and site.scheduler == "local":
        yield f"--queue {request.queue} has no effect: the job runs on this machine."
    if request.account and site.scheduler == "local":
        yield f"--account {request.account} has no effect: the job runs on this machine."
    if request.filesystems and site.scheduler in ("local", "lsf"):
        named = ",".join(request.filesystems)
        yield f"--filesystems {named} has no effect: {site.scheduler} has no such request."
    queue = site.queues.get(request.queue or "")
    if queue is not None and (said := remark(queue)):
        yield f"{site.queue_kind} {queue.name}: {said}."
    yield from site.remarks
    if site.limits:
        yield f"limits of {site.name}: {limit_words(site.limits)}."
    if site.live_limits:
        yield f"limits of the day: `{site.live_limits}`."


def network_faults(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield the faults of the emulated network in a request."""
    if request.network is None:
        return
    if site.scheduler != "local":
        yield (
            f"--network {request.network}: {site.name} has its own network. Remove the option, "
            "or add --site local for emulated hosts on this machine."
        )
        return
    try:
        network = parse_network(request.network)
    except UsageError as error:
        yield from str(error).splitlines()
        return
    if network is not None and "{network}" not in site.launcher_argv and not request.alone:
        yield (
            f"--network {request.network}: the launcher of profile '{site.name}' does not "
            'contain it. Add "{network}" to launcher.argv, after run.'
        )
    elif network is not None and request.nodes > MOST_HOSTS:
        yield f"--network {request.network} has addresses for {MOST_HOSTS} nodes. Use fewer."


def _missing(request: JobRequest, site: Site) -> Iterator[str]:
    if "account" in site.required and not request.account:
        yield (
            f"{site.name} needs an account to charge. Use --account PROJECT, set QSGD_ACCOUNT, "
            f"or write defaults: {{account: PROJECT}} to $QSGD_HOME/sites/{site.name}.yaml."
        )
    if "walltime" in site.required and request.walltime_min is None:
        yield f"{site.name} needs a walltime. Use --walltime 30m."
    if "filesystems" in site.required and not request.filesystems:
        valid = listing(site.filesystems)
        yield (
            f"{site.name} needs the file systems that the job uses ({valid}). "
            f"Use --filesystems {','.join(site.filesystems) or 'NAME'}."
        )
