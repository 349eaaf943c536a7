"""Failed nodes of jobs; queried only for jobs that ended because of a failed node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsgd_hpc.jobs.model import JobState, Progress
from qsgd_hpc.jobs.records.endings import node_words
from qsgd_hpc.jobs.schedulers.command import ask
from qsgd_hpc.jobs.schedulers.slurm_answers import hosts
from qsgd_hpc.jobs.schedulers.slurm_clusters import cluster_of, number_of, option

__all__ = ["blamed", "lines_of"]


def blamed(news: Mapping[str, Progress]) -> dict[str, Progress]:
    """Return the progress by job id, with the failed nodes of jobs in state NODE_FAIL."""
    return {job_id: _with_nodes(progress) for job_id, progress in news.items()}


def _with_nodes(progress: Progress) -> Progress:
    if progress.state is not JobState.NODE_FAIL or progress.bad_nodes:
        return progress
    nodes = _failed_nodes(str(progress.scheduler_id))
    return replace(progress, bad_nodes=nodes, why=node_words(nodes)) if nodes else progress


def _failed_nodes(key: str) -> tuple[str, ...]:
    """Return the nodes that Slurm names as failed, else nodes of the job that are down now."""
    where = option(cluster_of(key))
    query = ["sacct", "-X", "-n", "-P", *where, "-j", number_of(key), "-o"]
    named = {node for line in lines_of([*query, "FailedNode"]) for node in hosts(line)}
    if named:  # older versions do not have this column
        return tuple(sorted(named))
    mine = sorted({node for line in lines_of([*query, "NodeList"]) for node in hosts(line)})
    down = ["sinfo", "-h", "-N", *where, "-o", "%N", "-t", "down,drain,fail", "-n", ",".join(mine)]
    return tuple(sorted({*lines_of(down)} & {*mine})) if mine else ()


def lines_of(argv: Sequence[str]) -> list[str]:
    """Return the lines that a query prints; none if it fails."""
    answer = ask(argv)
    return [line.strip() for line in answer.out.splitlines()] if answer.code == 0 else []
