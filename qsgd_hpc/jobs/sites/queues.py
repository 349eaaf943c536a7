"""Choice of a queue for a job, and remedies if none accepts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.sites.profile import LIMITS, Queue, Site
from qsgd_hpc.jobs.words import clock, counted, did_you_mean, listing, plural

__all__ = ["AUTO", "crowd_fault", "limit_words", "pick", "queue_faults", "remark"]

# The value of --queue that selects a queue by the job's size, even if the profile has a default.
AUTO = "auto"

# Limits on jobs that wait or run; every part of a chain and every task of an array counts.
_COUNT_WAITING = ("per_user", "queued_per_user", "per_project", "queued_per_project")


def limit_words(limits: Mapping[str, int]) -> str:
    """Return ``two jobs per user, one job running per user``; empty if there is no limit."""
    return ", ".join(LIMITS[key].format(counted(n, "job")) for key, n in limits.items())


def remark(queue: Queue) -> str:
    """Return a remark on the queue for users, in one line; empty if there is none."""
    array = f"arrays at most {queue.array_at_once} at a time" if queue.array_at_once else ""
    chain = "" if queue.chain else "no chains of jobs"
    gpus = "nodes without GPU" if queue.gpus == 0 else ""
    parts = (queue.note, gpus, limit_words(queue.limits), array, chain)
    return "; ".join(part for part in parts if part)


def pick(site: Site, nodes: int, walltime_min: float | None) -> Queue | None:
    """Return the profile's first queue that accepts the job and may be chosen automatically."""
    fits = (q for q in _usable(site) if q.auto and _accepts(site, q, nodes, walltime_min))
    return next(fits, None)


def _usable(site: Site) -> list[Queue]:
    """Return the queues that accept submissions of jobs with whole nodes."""
    return [q for q in site.queues.values() if q.via is None and q.unit == "node"]


def _accepts(site: Site, queue: Queue, nodes: int, walltime_min: float | None) -> bool:
    return not any(_misfits(site, queue, nodes, walltime_min))


def queue_faults(
    site: Site, asked: str | None, nodes: int, walltime_min: float | None
) -> list[str]:
    """Return why the job fits no queue, or not the requested one, with remedies."""
    if not site.queues or nodes < 1:
        return []
    if asked is None:
        if pick(site, nodes, walltime_min):
            return []
        remedy = _remedy(site, None, nodes, walltime_min)
        return [
            f"no queue of {site.name} accepts {_size(nodes, walltime_min)} by default. {remedy}"
        ]
    queue = site.queues.get(asked)
    if queue is None:
        return [
            f"{site.name} has no {site.queue_kind} '{asked}'. {did_you_mean(asked, site.queues)}"
        ]
    if queue.via is not None:
        return [
            f"{site.queue_kind} '{asked}' accepts no submissions: '{queue.via}' routes jobs to "
            f"it. Use --queue {queue.via}."
        ]
    if queue.unit == "gpu":
        remedy = _remedy(site, None, nodes, walltime_min)
        if remedy.startswith("Use "):
            remedy = f"Remove --queue, and use {remedy.removeprefix('Use ')}"
        return [
            f"{site.queue_kind} '{asked}' of {site.name} allocates parts of a node, but jobs "
            f"here use whole nodes. {remedy}"
        ]
    misfits = list(_misfits(site, queue, nodes, walltime_min))
    if misfits:
        misfits[-1] += f" {_remedy(site, queue, nodes, walltime_min)}"
    return misfits


def crowd_fault(site: Site, queue: Queue, request: JobRequest) -> str | None:
    """Return why the queue cannot accept all parts of a chain, or tasks of an array, at once.

    The queue accepts each of them.
    """
    chain, nodes, walltime_min = request.chain, request.nodes, request.walltime_min
    jobs = max(chain, len(request.tasks))
    limit = _waiting_limit(site, queue, nodes, walltime_min)
    if limit is None or jobs <= (most := min(limit.values())):
        return None
    roomy = [
        q
        for q in _usable(site)
        if (q.chain or chain == 1) and _accepts(site, q, nodes, walltime_min)
        if jobs <= min((_waiting_limit(site, q, nodes, walltime_min) or {"": jobs}).values())
    ]
    if chain > 1:
        what, remove = f"{jobs} parts of a chain", "Remove --chain"
        changes = [f"--chain {most}"] if most > 1 else []
        end = "; or continue after each end with `qsgd-hpc resubmit ID`."
    else:
        what, changes, end = f"{jobs} tasks of an array", [], "."
        remove = f"Submit arrays of at most {most} tasks, one after the other"
        if most == 1:
            remove = "Submit the tasks as single jobs, one after the other"
    changes += map(_offer, roomy)
    remedy = f"Use {listing(changes)}" if changes else remove
    return (
        f"{site.queue_kind} '{queue.name}' of {site.name} accepts at most {limit_words(limit)}, "
        f"but the {what} are submitted at once. {remedy}{end}"
    )


def _waiting_limit(
    site: Site, queue: Queue, nodes: int, walltime_min: float | None
) -> dict[str, int] | None:
    """Return the smallest limit on jobs that wait or run, by its key; None: there is none."""
    targets = [site.queues[name] for name in queue.routes]
    ends = [q.limits for q in targets if q.takes(nodes, walltime_min)]
    limits = [
        (count, key)
        for held in (site.limits, queue.limits, *ends[:1])
        for key, count in held.items()
        if key in _COUNT_WAITING
    ]
    if not limits:
        return None
    count, key = min(limits)
    return {key: count}


def _misfits(site: Site, queue: Queue, nodes: int, walltime_min: float | None) -> Iterator[str]:
    """Yield one sentence for each reason why the queue refuses, or silently drops, the job."""
    what = f"{site.queue_kind} '{queue.name}' of {site.name}"
    in_nodes = queue.nodes[0] <= nodes <= queue.nodes[1]
    if not in_nodes:
        yield f"{what} accepts {_range(*queue.nodes)} nodes, not {nodes}."
    if walltime_min is None:
        return
    low, high = queue.walltime_min[0], queue.longest_min(nodes)
    if not low <= walltime_min <= high:
        size = f" for {plural(nodes, 'node')}" if queue.bins and in_nodes else ""
        yield (
            f"{what} accepts walltimes of {clock(low)} to {clock(high)}{size}, not "
            f"{clock(walltime_min)}."
        )
    elif in_nodes and queue.routes:
        targets = [site.queues[name] for name in queue.routes]
        if not any(q.takes(nodes, walltime_min) for q in targets):
            ranges = ", ".join(
                f"{q.name}: {_range(*q.nodes)} nodes, up to {clock(q.walltime_min[1])}"
                for q in targets
            )
            yield (
                f"{what} would accept {_size(nodes, walltime_min)} and then drop the job "
                f"silently: it is a routing queue, and none of its targets fits ({ranges})."
            )


def _remedy(site: Site, asked: Queue | None, nodes: int, walltime_min: float | None) -> str:
    """Return a queue that accepts the job, or the smallest change that helps."""
    usable = _usable(site)
    fits = [q for q in usable if _accepts(site, q, nodes, walltime_min)]
    if fits:
        return f"It fits {listing(map(_offer, fits))}."
    # If no queue is chosen automatically, those that a user can request.
    allowed = [asked] if asked is not None else [q for q in usable if q.auto] or usable
    ends = [
        part
        for queue in allowed
        for name in queue.routes or [queue.name]  # a routing queue accepts what a target accepts
        for part in _parts(site.queues[name])
    ]
    if not ends:
        return f"Valid: {listing(q.name for q in usable)}." if usable else "There is no other."
    changes = sorted(_change(q, nodes, walltime_min) for q in ends)
    # Prefer a change of one option to a change of both.
    single = [c for c in changes if c[0] == 1]
    chosen = list({flag: text for _, flag, _, text in reversed(single)}.values()) or [changes[0][3]]
    return f"Use {listing(reversed(chosen))}."


def _offer(queue: Queue) -> str:
    return f"--queue {queue.name}" + (f" ({said})" if (said := remark(queue)) else "")


def _parts(queue: Queue) -> list[Queue]:
    """Return one queue per range of nodes, if the walltime depends on the nodes."""
    return [
        replace(
            queue,
            nodes=each.nodes,
            walltime_min=(queue.walltime_min[0], min(queue.walltime_min[1], each.walltime_min)),
            bins=(),
        )
        for each in queue.bins
    ] or [queue]


def _change(queue: Queue, nodes: int, walltime_min: float | None) -> tuple[int, str, float, str]:
    """Return (number of options to change, last option, distance, text) for the queue to accept."""
    words: list[str] = []
    flag, far = "", 0.0
    low, high = queue.nodes
    if nodes != (near := min(max(nodes, low), high)):
        words.append(f"--nodes {near}")
        flag, far = "nodes", abs(near / nodes - 1)
    if walltime_min is not None:
        least, most = queue.walltime_min
        if walltime_min > most:
            words.append(f"--walltime {clock(most)} or less")
        elif walltime_min < least:
            words.append(f"--walltime {clock(least)} or more")
        if not least <= walltime_min <= most:
            flag, far = (
                "walltime",
                far + abs(min(max(walltime_min, least), most) / walltime_min - 1),
            )
    return len(words), flag, far, listing(words, "with")


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _size(nodes: int, walltime_min: float | None) -> str:
    count = plural(nodes, "node")
    return count if walltime_min is None else f"{count} for {clock(walltime_min)}"
