"""Slurm with several clusters: the cluster of a job, and the options of commands. Pure.

``sbatch --clusters`` answers ``8653762;gpu``; that is how such a job is recorded. An id without a
cluster is one of the cluster that Slurm's commands talk to by themselves. Numbers repeat: job 11 of
one cluster is not job 11 of another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from qsgd_hpc.jobs.model import Job, JobRequest

__all__ = ["candidates", "cluster_of", "number_of", "option", "with_choice", "within"]

# What tells sbatch where to go; it wins over the script.
_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--clusters?(?:=|\s+)|-M\s*)(\S+)")


def number_of(key: str) -> str:
    """Return the number in an id such as ``8653762;gpu``."""
    return key.partition(";")[0]


def cluster_of(key: str) -> str:
    """Return the cluster in an id; "" stands for the one that commands talk to by themselves."""
    return key.partition(";")[2]


def within(number: str, cluster: str) -> str:
    """Return the id of a job, or of a task of an array, in a cluster."""
    return f"{number};{cluster}" if cluster else number


def option(cluster: str) -> list[str]:
    """Return what makes a command of Slurm speak of this cluster alone."""
    return [f"--clusters={cluster}"] if cluster else []


def with_choice(request: JobRequest, environ: Mapping[str, str]) -> JobRequest:
    """Return the request with the clusters that variables name: they may be others tomorrow."""
    named = next((value for name in _VARIABLES if (value := environ.get(name))), "")
    if not named or named == _directed(request.extra):
        return request
    return dataclasses.replace(request, extra=(*request.extra, f"#SBATCH --clusters={named}"))


def candidates(job: Job) -> str:
    """Return the cluster of a job, or those that it may go to, separated by commas."""
    if cluster := cluster_of(job.progress.scheduler_id or ""):
        return cluster
    try:
        script = job.script_path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        script = []
    return _directed([*script, *job.request.extra])


def _directed(lines: Iterable[str]) -> str:
    """Return what the last directive about clusters says, as sbatch takes it."""
    found = [match[1] for line in lines if (match := _DIRECTIVE.match(line))]
    return found[-1] if found else ""
