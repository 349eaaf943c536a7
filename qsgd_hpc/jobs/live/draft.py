"""A first profile of a machine, from what its scheduler says. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from qsgd_hpc.jobs.live.facts import Live, LiveQueue
from qsgd_hpc.jobs.words import clock

__all__ = ["draft"]

# A scheduler that sets no limit gets these, marked to be verified.
NO_LIMIT_MIN = 48 * 60.0
LEAST_MIN = 1 / 60


def draft(name: str, live: Live, base: str, host_name: str | None) -> str:
    """Return the YAML of a profile that extends ``base``.

    Args:
        name: of the site.
        live: what the scheduler says; empty facts become lines to fill in.
        base: the generic profile of the scheduler.
        host_name: of this login host, or None.
    """
    return "\n".join(_lines(name, live, base, host_name)) + "\n"


def _lines(name: str, live: Live, base: str, host_name: str | None) -> Iterator[str]:
    yield f"# {name}: written from what {live.scheduler} says. Fill in what is marked, then run"
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
    yield "# Write what a job must name: required: [account, walltime, filesystems]"
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
        yield f"  cores: {cpus} # the scheduler's CPUs; half of it if those are hardware threads"
    else:
        yield "  # cores: 64"
    yield f"  gpus: {gpus}"
    yield "  verify: true"


def _gpu(gpus: int) -> Iterator[str]:
    if gpus:
        order = ", ".join(map(str, range(gpus)))
        yield ""
        yield "# order: the GPU beside the cores of local rank 0 first; see `nvidia-smi topo -m`."
        yield "# variable: ROCR_VISIBLE_DEVICES for AMD, ZE_AFFINITY_MASK for Intel."
        yield f"gpu: {{variable: CUDA_VISIBLE_DEVICES, order: [{order}], verify: true}}"


def _queues(live: Live, gpus: int) -> Iterator[str]:
    taken = {route: q.name for q in live.queues.values() for route in q.routes}
    shown = [q for q in live.queues.values() if q.is_open]
    # The shortest first: it is the one that starts soonest.
    shown.sort(key=lambda q: (q.name in taken, q.walltime_min[1] or NO_LIMIT_MIN, q.nodes[1] or 0))
    yield "# Without --queue the first that takes the job is used, but for those with auto: false."
    if not shown:
        yield '# queues: {debug: {nodes: [1, 2], walltime: ["00:05:00", "01:00:00"]}}'
        return
    yield "queues:"
    yield from (f"  {_queue(q, live, taken, gpus)}" for q in shown)
    if live.default_queue:
        yield f"# {live.default_queue} is what the scheduler takes when none is named."
    if live.qos:
        yield f"# QOS, if jobs name one (qos: NAME within a queue): {', '.join(live.qos)}"


def _queue(queue: LiveQueue, live: Live, taken: dict[str, str], gpus: int) -> str:
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
    there = [route for route in queue.routes if route in live.queues]
    if there:
        words.append(f"routes: [{', '.join(map(_text, there))}]")
    if queue.route_only and queue.name in taken:
        words.append(f"via: {_text(taken[queue.name])}")
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
    """Return a word as YAML, quoted where it would not be the same text without."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", word)
    reserved = word.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return word if plain and not reserved else json.dumps(word)
