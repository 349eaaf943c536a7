"""The checks of ``qsgd-hpc doctor``: each is a function that returns findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qsgd_hpc.checkup import installation, launching
from qsgd_hpc.checkup.finding import Finding, Level, fault

__all__ = ["CHECKS", "Finding", "Level", "examine"]

Check = Callable[[], list[Finding]]

CHECKS: dict[str, Check] = {
    "Python": installation.python,
    "qsgd-hpc": installation.package,
    "compiled core": installation.core,
    "GPU kernels": installation.gpu_kernels,
    "MPI": launching.mpi,
    "frameworks": installation.frameworks,
    "torchrun": launching.torchrun,
    "site": launching.site,
    "job folder": launching.job_folder,
    "shared memory": installation.shared_memory,
    "--network": launching.emulated_network,
    "GPUs": installation.gpus,
    "variables": installation.variables,
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
