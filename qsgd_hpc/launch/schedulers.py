"""The schedulers of batch jobs: detection, and the resources that jobs can request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["JOB_IDS", "NODE_FILES", "SCHEDULERS", "SchedulerTraits", "in_batch_job"]


@dataclass(frozen=True)
class SchedulerTraits:
    """One scheduler; its commands are in the module of its name in ``jobs/schedulers``.

    Attributes:
        directive: prefix of the lines of a job script that the scheduler reads.
        command: program that submits a job; if it is installed, the machine has the scheduler.
            Empty: no program is needed.
        job_id: variable that is set in its jobs.
        node_file: variable that names the file of a job's nodes; empty if there is none.
        first_node: bash command that prints the first node of a job; empty: the first line of the
            node file is used.
        requeues: whether it can restart a job automatically.
        excludes: whether a job can exclude nodes.
        waits_for_any: whether a job can wait for the end of another one that may fail.
        bad_path: pattern that the path of a job's output must not contain, and its description.
    """

    directive: str
    command: str = ""
    job_id: str = ""
    node_file: str = ""
    first_node: str = ""
    requeues: bool = False
    excludes: bool = False
    waits_for_any: bool = True
    bad_path: tuple[str, str] | None = None

    @property
    def prints_first_node(self) -> str | None:
        """Shell command that prints the first node of a job."""
        from_file = f'head -n 1 -- "${self.node_file}" 2> /dev/null' if self.node_file else None
        return self.first_node or from_file


# Slurm is first: many Slurm machines also have a qsub, which converts PBS scripts to Slurm's.
SCHEDULERS = {
    "slurm": SchedulerTraits(
        "#SBATCH",
        "sbatch",
        "SLURM_JOB_ID",
        first_node='scontrol show hostnames "$SLURM_JOB_NODELIST" 2> /dev/null | head -n 1',
        requeues=True,
        excludes=True,
        bad_path=(r"\\", "a backslash"),
    ),
    "pbs": SchedulerTraits(
        "#PBS",
        "qsub",
        "PBS_JOBID",
        "PBS_NODEFILE",
        requeues=True,
        bad_path=("[^ -~]", "characters other than printable ASCII"),
    ),
    "cobalt": SchedulerTraits(
        "#COBALT", "qsub", "COBALT_JOBID", "COBALT_NODEFILE", waits_for_any=False
    ),
    "lsf": SchedulerTraits(
        "#BSUB",
        "bsub",
        "LSB_JOBID",
        "LSB_DJOB_HOSTFILE",
        # The file may begin with a node that runs only the script, named batch1 or similarly.
        first_node='grep -v -m 1 -- batch "$LSB_DJOB_HOSTFILE" 2> /dev/null',
        requeues=True,
        bad_path=("%[IJ]", "%I or %J, which it replaces"),
    ),
    "local": SchedulerTraits("#"),
}

JOB_IDS = tuple(each.job_id for each in SCHEDULERS.values() if each.job_id)
NODE_FILES = tuple(each.node_file for each in SCHEDULERS.values() if each.node_file)


def in_batch_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a batch job, including those of Flux and Grid Engine."""
    return any(name in environ for name in (*JOB_IDS, "FLUX_JOB_ID", "PE_HOSTFILE"))
