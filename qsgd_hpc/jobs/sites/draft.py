"""Draft a profile for a machine without one, from its scheduler's answers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import Host, live, usable
from qsgd_hpc.jobs.sites.files import sources
from qsgd_hpc.jobs.sites.live import Live, LiveQueue
from qsgd_hpc.jobs.words import clock, listing

__all__ = ["draft", "new_profile"]

# Limits of queues for which the scheduler reports none; marked to be verified.
NO_LIMIT_MIN = 48 * 60.0
LEAST_MIN = 1 / 60


def new_profile(name: str, scheduler: str | None, host: Host, *, force: bool) -> str:
    """Return the YAML of a new profile.

    Args:
        name: name of the site; it must be new, unless ``force``.
        scheduler: the scheduler to query; None: none was found.
        host: this machine.
        force: replace the user's file of that name.

    Raises:
        UsageError: the name exists or is invalid, there is no scheduler, or it is one that cannot
            be asked about its machine.
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
    if scheduler not in live.ASKED:
        raise UsageError(
            f"a profile for {scheduler} must be written by hand, as "
            f"{env.home() / 'sites' / name}.yaml: docs/jobs.md has an example for LSF, and "
            f"jobs/README.md describes the keys. Then use `qsgd-hpc sites check {name}`."
        )
    here = shutil.which(live.ASKED[scheduler]) is not None
    found = live.look(scheduler) if here else Live(scheduler)
    return draft(name, found, _generic(scheduler), host.host_names[0] if here else None)


def _refuse_taken(name: str, force: bool) -> None:
    own = env.home() / "sites" / f"{name}.yaml"
    if own.exists() and not force:
        raise UsageError(f"{own} already exists. Use another name, or --force to replace it.")
    layers = {source.layer for source in sources(name)} - {"user"}
    if layers and not force:
        raise UsageError(
            f"site '{name}' already exists ({', '.join(sorted(layers))}): `qsgd-hpc sites check "
            f"{name}` compares it with the machine. Use another name, or --force to override it."
        )


def _generic(scheduler: str) -> str:
    for name, site in usable()[0].items():
        if site.generic and site.scheduler == scheduler:
            return name
    raise UsageError(f"no profile is marked generic: true for {scheduler}")


def draft(name: str, live: Live, base: str, host_name: str | None) -> str:
    """Return the YAML of a profile that extends ``base``.

    Args:
        name: name of the site.
        live: the scheduler's answers; missing values become lines to fill in.
        base: name of the scheduler's generic profile.
        host_name: name of this login host, or None.
    """
    return "\n".join(_lines(name, live, base, host_name)) + "\n"


def _lines(name: str, live: Live, base: str, host_name: str | None) -> Iterator[str]:
    yield f"# {name}: drafted from the answers of {live.scheduler}. Complete it, then run"
    yield f"#   qsgd-hpc sites check {name}"
    yield f"extends: {base}"
    yield f"description: {_text(f'{name}, {live.nodes} nodes' if live.nodes else name)}"
    if host_name:
        pattern = re.sub(r"\d+", "*", host_name.split(".")[0])
        yield f"login_hosts: [{_text(pattern)}] # must fit this machine's login hosts and no others"
    if live.nodes:
        yield f"nodes: {live.nodes}"
    yield from _node(live)
    gpus = max(live.gpus, default=0)
    yield from _gpu(gpus)
    yield ""
    yield "# Options that every job needs: required: [account, walltime, filesystems]"
    yield "# defaults: {account: PROJECT}"
    yield "defaults:"
    yield '  walltime: "00:30:00"'
    if live.filesystems:
        yield f"filesystems: [{', '.join(map(_text, live.filesystems))}]"
    yield ""
    yield from _queues(live, gpus)
    yield ""
    yield "# Lines of the shell that run before the ranks, such as: setup: [module load python]"
    yield from _directives(live, gpus)
    if gpus or not live.nodes:
        yield "verify: [directives]"


def _node(live: Live) -> Iterator[str]:
    cpus = max(live.cpus, default=0)
    gpus = max(live.gpus, default=0)
    yield "node:"
    if cpus:
        yield f"  cores: {cpus} # CPUs in the scheduler; half of them if they are hardware threads"
    else:
        yield "  # cores: 64"
    yield f"  gpus: {gpus}"
    yield "  verify: true"


def _gpu(gpus: int) -> Iterator[str]:
    if gpus:
        order = ", ".join(map(str, range(gpus)))
        yield ""
        yield "# order: the GPU nearest the cores of local rank 0 first; see `nvidia-smi topo -m`."
        yield "# variable: ROCR_VISIBLE_DEVICES for AMD, ZE_AFFINITY_MASK for Intel."
        yield f"gpu: {{variable: CUDA_VISIBLE_DEVICES, order: [{order}], verify: true}}"


def _queues(live: Live, gpus: int) -> Iterator[str]:
    routed = {route: q.name for q in live.queues.values() for route in q.routes}
    shown = [q for q in live.queues.values() if q.is_open]
    # Queues with short walltimes first, because their jobs start soonest.
    shown.sort(key=lambda q: (q.name in routed, q.walltime_min[1] or NO_LIMIT_MIN, q.nodes[1] or 0))
    yield "# Without --queue, the first one without auto: false that accepts the job is used."
    if not shown:
        yield '# queues: {debug: {nodes: [1, 2], walltime: ["00:05:00", "01:00:00"]}}'
        return
    yield "queues:"
    yield from (f"  {_queue(q, live, routed, gpus)}" for q in shown)
    if live.default_queue:
        yield f"# The scheduler's default is {live.default_queue}."
    if live.qos:
        yield f"# QOS, if jobs name one (qos: NAME within a queue): {', '.join(live.qos)}"


def _queue(queue: LiveQueue, live: Live, routed: dict[str, str], gpus: int) -> str:
    (low, high), (least, most) = queue.nodes, queue.walltime_min
    high_known = high or queue.total_nodes or live.nodes
    words = [
        f"nodes: [{low or 1}, {high_known or low or 1}]",
        f'walltime: ["{clock(least or LEAST_MIN)}", "{clock(most or NO_LIMIT_MIN)}"]',
    ]
    if queue.gpus and max(queue.gpus) != gpus:
        words.append(f"gpus: {max(queue.gpus)}")
    if queue.cpus and queue.cpus != live.cpus[-1:]:
        words.append(f"cores: {queue.cpus[0]}")
    routes = [route for route in queue.routes if route in live.queues]
    if routes:
        words.append(f"routes: [{', '.join(map(_text, routes))}]")
    if queue.route_only and queue.name in routed:
        words.append(f"via: {_text(routed[queue.name])}")
    elif gpus and queue.gpus and not max(queue.gpus):
        words.append("auto: false")
    if not high or not most:
        words.append("verify: true")
    return f"{_text(queue.name)}: {{{', '.join(words)}}}"


def _directives(live: Live, gpus: int) -> Iterator[str]:
    if live.scheduler == "slurm" and gpus:
        yield 'directives: [--exclusive, "--gpus-per-node={gpus}"]'
    elif live.scheduler == "pbs" and (gpus or live.cpus):
        chunk = "{nodes}:mpiprocs={ranks_per_node}"
        chunk += f":ncpus={max(live.cpus)}" if live.cpus else ""
        chunk += f":ngpus={gpus}" if gpus else ""
        yield f'directives: ["-l select={chunk}", "-l place=scatter:excl"]'


def _text(word: str) -> str:
    """Return a word as YAML, quoted if YAML would otherwise not read it as this text."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", word)
    reserved = word.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return word if plain and not reserved else json.dumps(word)
