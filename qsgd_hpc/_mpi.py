"""The MPI that this process uses, as mpi4py found it: the one place in Python that touches MPI.

Which one that is: a libmpi in the Python environment (``pip install qsgd-hpc[mpich]`` puts one
there), else the first on the linker path (a site's module); ``MPI4PY_LIBMPI`` overrides both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError

__all__ = ["Mpi", "split_nodes", "start_mpi"]

# As mpi4py names them.
KNOWN_VENDORS = frozenset(
    {"MPICH", "MPICH2", "MPICH3", "MVAPICH", "MVAPICH2", "Intel MPI", "Cray MPICH"}
    | {"Open MPI", "Spectrum MPI"}
)


@dataclass(frozen=True)
class Mpi:
    """An initialised MPI and what the core must know of it."""

    module: Any
    """mpi4py.MPI."""
    library: str
    """First line of what MPI_Get_library_version says."""
    pointer_handles: bool
    owned: bool
    """Whether this package initialised MPI, and so finalises it."""


def start_mpi() -> Mpi:
    """Initialise MPI with MPI_THREAD_MULTIPLE, or take over what the script has initialised.

    Raises:
        UsageError: there is no MPI library, it is unknown, or it lacks MPI_THREAD_MULTIPLE.
    """
    owned = "mpi4py.MPI" not in sys.modules
    module = _import_mpi(owned)
    if module.Is_finalized():
        raise UsageError("MPI was finalised in this process; it cannot be started again")
    library = module.Get_library_version().split("\n")[0].strip(" \0")
    if module.Query_thread() < module.THREAD_MULTIPLE:
        raise UsageError(
            f"the MPI in this process ({library}) does not provide MPI_THREAD_MULTIPLE, which the "
            "background engine needs. If the script calls mpi4py.rc(thread_level=...), remove "
            "that; else load an MPI module that is built with thread support."
        )
    return Mpi(module, library, _pointer_handles(module, library), owned)


def _import_mpi(owned: bool) -> Any:
    try:
        import mpi4py

        if owned:
            # After a rank has died MPI_Finalize would wait for it for ever, so this package
            # decides at exit whether to call it.
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            f"no MPI library could be loaded ({error}). Load your site's MPI module, or install "
            "the embedded one: pip install 'qsgd-hpc[mpich]'. MPI4PY_LIBMPI names a libmpi "
            "explicitly."
        ) from None
    return MPI


def _pointer_handles(module: Any, library: str) -> bool:
    """Tell whether handles are pointers (Open MPI, MPI 5's ABI) or ints (MPICH and its kin)."""
    width = module._sizeof(module.COMM_WORLD)
    found = {4: "int", 8: "pointer"}[width]
    vendor, _ = module.get_vendor()
    chosen = env.get("QSGD_MPI_ABI")
    if chosen is None and vendor not in KNOWN_VENDORS:
        raise UsageError(
            f"unknown MPI library: {library} (vendor {vendor!r}). Known are "
            f"{', '.join(sorted(KNOWN_VENDORS))}. Its handles have {width} bytes; set "
            f"QSGD_MPI_ABI={found} to try it, and check the results with the contract tests."
        )
    if chosen not in (None, found):
        raise UsageError(
            f"QSGD_MPI_ABI={chosen}, but the handles of {library} have {width} bytes; unset it"
        )
    return found == "pointer"


def split_nodes(mpi: Mpi, comm: Any, ranks_per_node: int | None) -> tuple[int, int, int, int]:
    """Return local_rank, local_size, cross_rank, cross_size.

    A node is what shares memory, or each run of ``ranks_per_node`` ranks when that is given.
    """
    rank = comm.Get_rank()
    if ranks_per_node is None:
        local = comm.Split_type(mpi.module.COMM_TYPE_SHARED, key=rank)
    else:
        local = comm.Split(rank // ranks_per_node, key=rank)
    cross = comm.Split(local.Get_rank(), key=rank)
    facts = local.Get_rank(), local.Get_size(), cross.Get_rank(), cross.Get_size()
    local.Free()
    cross.Free()
    return facts
