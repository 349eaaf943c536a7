"""Render the wrapper that pins each rank, from a filled request and a profile. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import MappingProxyType

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.script.templating import shell_templates
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.place import launchers

__all__ = ["cores_per_rank", "gpu_view", "known_launcher", "render_wrapper"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Launchers of one family only; mpiexec and ibrun exist in several.
_PROGRAMS = {"srun": "slurm", "flux": "flux", "jsrun": "jsm"}


def known_launcher(site: Site) -> str | None:
    """Return the family (see ``place.LAUNCHERS``) of the site's launcher, if it is known."""
    return _PROGRAMS.get(PurePath(site.launcher_argv[0]).name)


def gpu_view(request: JobRequest, site: Site) -> str | None:
    """Return the GPUs that the wrapper shows to a rank: ``all``, ``one``, or None: not changed.

    It is None if there are no GPUs, the launcher binds them, or the user sets the variable.
    """
    if not (site.gpu and site.gpu.order) or site.gpu.bound_by == "launcher":
        return None
    return None if site.gpu.variable in request.env else request.gpu_view or site.gpu.view


def cores_per_rank(request: JobRequest, site: Site) -> int:
    """Return the number of cores of one rank, at least 1.

    With fewer ranks than GPUs on a node, a rank gets the cores for one GPU, so that it stays near
    its own.
    """
    return max(1, (site.cores or 1) // max(request.ranks_per_node or 1, site.gpus, 1))


def render_wrapper(
    request: JobRequest,
    site: Site,
    *,
    omp_threads: int | None,
    exports: Mapping[str, str] = MappingProxyType({}),
    start_up: str | None = None,
) -> str:
    """Return the bash script that each rank runs before its program.

    ``bash pin.sh PROGRAM ARGS...`` sets the rank's variables and executes the program. Variables
    that the user sets by ``--env`` are not changed. Lists are used cyclically: local rank 5 of a
    profile with four GPUs gets the second.

    Args:
        request: filled by :func:`validate.fill`.
        site: the profile.
        omp_threads: OMP_NUM_THREADS of a rank; None: not changed.
        exports: variables that every rank gets.
        start_up: a folder to put first on PYTHONPATH; None: not changed.
    Raises:
        UsageError: the profile's local_rank_variables contain an invalid name.
    """
    for name in site.local_rank_variables:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"site '{site.name}': local_rank_variables: {name!r} is not a valid name of a "
                "variable: use letters, digits and _."
            )
    local_ranks, ranks, _, _ = zip(*launchers(known_launcher(site)), strict=True)
    nic = site.nic if site.nic and site.nic.variable not in request.env else None
    return (
        shell_templates()
        .get_template("pin.sh.j2")
        .render(
            site=site,
            exports=exports,
            start_up=start_up,
            ranks_per_node=request.ranks_per_node or 1,
            gpu=site.gpu,
            view=gpu_view(request, site),
            nic=nic if nic and nic.order else None,
            cpus=site.cpu.lists if site.cpu.bound_by == "wrapper" else (),
            torchrun=request.sets_torchrun,
            nodes=request.nodes,
            ranks=request.ranks,
            # Under other launchers, SLURM_NODEID is that of the batch script's node on every rank.
            node_name="SLURM_NODEID" if known_launcher(site) == "slurm" else "PALS_NODEID",
            omp_threads=None if "OMP_NUM_THREADS" in request.env else omp_threads,
            local_rank_names=_lines((*site.local_rank_variables, *local_ranks)),
            rank_names=_lines(ranks),
            remedy=f"Find one with: {site.launcher_argv[0]} -n 2 env | grep -i rank. Add it to "
            f"the profile, sites/{site.name}.yaml in QSGD_HOME: local_rank_variables: "
            "[NAME]",
        )
    )


def _lines(names: Iterable[str]) -> list[str]:
    """Return the names, each once, in readable lines."""
    return textwrap.wrap(" ".join(dict.fromkeys(names)), 76)
