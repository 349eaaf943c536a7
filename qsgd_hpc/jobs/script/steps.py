"""Steps: programs that run in sequence inside one job, each on its first nodes.

A job whose script is ``alone`` allocates the nodes. A step's script has the setup, variables,
launcher and pinning of a job script, for some of these nodes.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.request.prepare import prepare
from qsgd_hpc.jobs.script.render import Place, Tools, render_script
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.schedulers import NODE_FILES

__all__ = ["Step", "first_nodes", "host_lines", "lines_per_host", "node_lines", "step_scripts"]

OWN = "{qsgd_hpc}"
SCONTROL_LIMIT_S = 60.0


@dataclass(frozen=True)
class Step:
    """A program on the first nodes of a job.

    Attributes:
        request: script, arguments, variables, nodes and network of the step; other fields are
            ignored, because the job's values apply.
        directory: folder in which the step records its start and end.
        hosts: path of the file with its :func:`host_lines`.
    """

    request: JobRequest
    directory: Path
    hosts: Path


def step_scripts(job: JobRequest, steps: Sequence[Step]) -> tuple[list[str], int | None]:
    """Return the scripts that run these steps inside a job, and the host lines per step.

    Raises:
        UsageError: the job is faulty, or the site's launcher cannot be restricted to some nodes.
    """
    filled, site = prepare(job, dry_run=True)
    scripts = []
    for step in steps:
        restricted = dataclasses.replace(site, launcher_argv=first_nodes(site, step.hosts))
        own = dataclasses.replace(
            filled,
            script=step.request.script,
            script_args=step.request.script_args,
            nodes=step.request.nodes,
            network=step.request.network or filled.network,
            env=step.request.env,
            name=step.request.name,
            alone=False,
            walltime_min=None,  # the job's limit applies
            stop_before_min=None,
        )
        scripts.append(render_script(own, restricted, Tools.here(), Place(step.directory)))
    return scripts, lines_per_host(site, filled.ranks_per_node or 1)


def first_nodes(site: Site, hosts: Path) -> tuple[str, ...]:
    """Return the site's launcher with options that restrict it to the nodes of a host file.

    Raises:
        UsageError: this launcher has no such option.
    """
    if site.scheduler == "local":
        return site.launcher_argv
    first, *rest = site.launcher_argv
    file = str(hosts).replace("{", "{{").replace("}", "}}")
    program = PurePath(first).name
    if program == "srun":
        return (first, "--nodes={nodes}", "--relative=0", *rest)
    if program == "ibrun":
        return (first, "-n", "{ranks}", "-o", "0", *rest)
    if program in ("mpiexec", "mpirun"):
        return (first, "--hostfile", file, *rest)
    if first == OWN and rest[:1] == ["run"]:
        return (first, "run", "--hostfile", file, *rest[1:])
    raise UsageError(
        f"site {site.name} starts ranks with {program}, which cannot be restricted to a part of "
        "a job's nodes. Use a job for each point (--separate)."
    )


def host_lines(lines: Iterable[str], nodes: int, per_host: int | None) -> list[str]:
    """Return the host file of the first nodes.

    Args:
        lines: the job's node file, in which the scheduler lists each node once, or once per rank.
        nodes: number of nodes.
        per_host: lines for each node; None keeps those of the node file.
    """
    given = [line.strip() for line in lines if line.strip()]
    first = list(dict.fromkeys(given))[:nodes]
    if per_host is None:
        return [line for line in given if line in first]
    return [host for host in first for _ in range(per_host)]


def lines_per_host(site: Site, ranks_per_node: int) -> int | None:
    """Return how often a step's host file lists each node; None: as often as the scheduler's file.

    A site's MPI expects the scheduler's format; ``qsgd-hpc run`` starts one rank per line.
    """
    return ranks_per_node if site.launcher_argv[0] == OWN else None


def node_lines(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the lines of the current job's node file; none on a single machine.

    Raises:
        LaunchError: Slurm does not answer.
    """
    for name in NODE_FILES:
        if file := environ.get(name):
            return Path(file).read_text().splitlines()
    if not (nodes := environ.get("SLURM_JOB_NODELIST")):
        return ()
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=SCONTROL_LIMIT_S,
            check=True,
            env={**os.environ, **environ},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol did not return the nodes of the job: {error}") from None
    return done.stdout.split()
