"""All checks in the order of the output, and a function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qsgd_hpc.checkup.cluster import emulated_network
from qsgd_hpc.checkup.finding import Finding, fault
from qsgd_hpc.checkup.frameworks import frameworks
from qsgd_hpc.checkup.home import job_folder
from qsgd_hpc.checkup.installation import core, gpu_kernels, package, python
from qsgd_hpc.checkup.machine import gpus, shared_memory, variables
from qsgd_hpc.checkup.mpi import mpi
from qsgd_hpc.checkup.site import site
from qsgd_hpc.checkup.torchrun import torchrun

__all__ = ["CHECKS", "examine"]

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
