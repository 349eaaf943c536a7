"""The checks of ``qsgd-hpc doctor``: each is a function that returns findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qsgd_hpc.checkup.finding import Finding, Level, fault
from qsgd_hpc.checkup.installation import core, frameworks, gpu_kernels, package, python
from qsgd_hpc.checkup.jobs import job_folder, site
from qsgd_hpc.checkup.launching import emulated_network, mpi, torchrun
from qsgd_hpc.checkup.machine import gpus, shared_memory, variables

__all__ = ["CHECKS", "Finding", "Level", "examine"]

Check = Callable[[], list[Finding]]

CHECKS: dict[str, Check] = {
    "Python": python,
    "qsgd-hpc": package,
    "compiled core": core,
    "GPU kernels": gpu_kernels,
    "MPI": mpi,
    "frameworks": frameworks,
    "torchrun": torchrun,
    "site": site,
    "job folder": job_folder,
    "shared memory": shared_memory,
    "--network": emulated_network,
    "GPUs": gpus,
    "variables": variables,
}


def examine(checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Run all checks; a crash of one is reported as a fault, and the others continue."""
    found: list[Finding] = []
    for topic, check in checks.items():
        try:
            found += check()
        except Exception as error:  # the other findings are more useful than a traceback
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(fault(topic, text, "Report it with the output of `qsgd-hpc doctor`."))
    return found
