"""Slurm with several clusters: the cluster of a job, and the options of commands. Pure.

``sbatch --clusters`` prints ids such as ``8653762;gpu``, which are recorded in this form. An id
without a cluster is of the default cluster, to which Slurm's commands send queries without options.
Numbers are not unique: job 11 of one cluster is not job 11 of another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from qsgd_hpc.jobs.model import Job, JobRequest

__all__ = [
    "candidates",
    "cluster_name",
    "cluster_of",
    "number_of",
    "option",
    "with_choice",
    "within",
]

# Variables that select sbatch's clusters; they take precedence over the script.
_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--clusters?(?:=|\s+)|-M\s*)(\S+)")


def number_of(key: str) -> str:
    """Return the number in an id such as ``8653762;gpu``."""
    return key.partition(";")[0]


def cluster_of(key: str) -> str:
    """Return the cluster in an id; "" is the default cluster."""
    return key.partition(";")[2]


def cluster_name(cluster: str) -> str:
    """Return a cluster's name for messages; "" is the default cluster."""
    return f"cluster {cluster}" if cluster else "the default cluster"


def within(number: str, cluster: str) -> str:
    """Return the id of a job, or of a task of an array, in a cluster."""
    return f"{number};{cluster}" if cluster else number


def option(cluster: str) -> list[str]:
    """Return the option that restricts a command of Slurm to a cluster; none for the default."""
    return [f"--clusters={cluster}"] if cluster else []


def with_choice(request: JobRequest, environ: Mapping[str, str]) -> JobRequest:
    """Return the request with a directive for the clusters that variables select.

    The variables may have other values when the job is resubmitted.
    """
    named = next((value for name in _VARIABLES if (value := environ.get(name))), "")
    if not named or named == _directed(request.extra):
        return request
    return dataclasses.replace(request, extra=(*request.extra, f"#SBATCH --clusters={named}"))


def candidates(job: Job) -> str:
    """Return the cluster of a job, or all in which it may run, separated by commas."""
    if cluster := cluster_of(job.progress.scheduler_id or ""):
        return cluster
    try:
        script = job.script_path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        script = []
    return _directed([*script, *job.request.extra])


def _directed(lines: Iterable[str]) -> str:
    """Return the clusters of the last directive that names some, which sbatch uses."""
    found = [match[1] for line in lines if (match := _DIRECTIVE.match(line))]
    return found[-1] if found else ""
