"""The MPI of this process and the communicators of jobs; it alone starts and finalises MPI.

mpi4py loads the libmpi of the Python environment (installed by ``pip install qsgd-hpc[mpich]``), or
else the first on the linker path (a site's module); ``MPI4PY_LIBMPI`` overrides both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.claims import (
    SHORT_ADDRESSES,
    LoadedMpi,
    broken_claim,
    claims,
    is_installed,
    loaded_library,
    no_mpi,
    not_connected,
    pip_package,
    rank_of,
    under_pmi2_of_slurm,
)

__all__ = [
    "Layout", "Mpi", "communicators", "core_facts", "finalise", "find_layout", "give_up",
    "holds_everywhere", "share_node", "start_mpi",
]  # fmt: skip

# In mpi4py's spelling.
OPEN_MPI_VENDORS = frozenset({"Open MPI", "Spectrum MPI"})
KNOWN_VENDORS = OPEN_MPI_VENDORS.union(
    ("MPICH", "MPICH2", "MPICH3", "MVAPICH", "MVAPICH2", "Intel MPI", "Cray MPICH")
)

_RDMA_DEVICES = Path("/sys/class/infiniband")
_ALIGNMENT = 4096  # a page: flags and slots must not straddle cache lines

_EXPECTED = (
    "pass an mpi4py communicator such as MPI.COMM_WORLD.Split(color, key), a list of ranks, or a "
    "list of communicators"
)
_given_up = False


@dataclass(frozen=True)
class Mpi:
    """An initialised MPI and its properties that the core needs."""

    module: Any
    """mpi4py.MPI."""
    library: str
    """First line of the result of MPI_Get_library_version."""
    pointer_handles: bool


def start_mpi() -> Mpi:
    """Initialise MPI with MPI_THREAD_MULTIPLE, or use the MPI that the script has initialised.

    Raises:
        UsageError: there is no MPI library, it is unknown, it lacks MPI_THREAD_MULTIPLE, or it
            sees fewer ranks than the launcher has started.
    """
    module = _import_mpi(first="mpi4py.MPI" not in sys.modules)
    if module.Is_finalized():
        raise UsageError("MPI was finalised in this process; it cannot be started again")
    library = module.Get_library_version().split("\n")[0].strip(" \0")
    if module.Query_thread() < module.THREAD_MULTIPLE:
        raise UsageError(
            f"the MPI in this process ({library}) does not provide MPI_THREAD_MULTIPLE, which "
            "the background engine needs. If the script calls mpi4py.rc(thread_level=...), "
            "remove that call; otherwise load an MPI module that is built with thread support."
        )
    _require_connected(module, os.environ)
    return Mpi(module, library, _pointer_handles(module, library))


def give_up() -> None:
    """Record that a rank has died: ``MPI_Finalize`` would wait for it forever."""
    global _given_up
    _given_up = True


def finalise() -> None:
    """At exit: finalise MPI if this package has initialised it and no rank has died.

    If the script imported mpi4py first, mpi4py finalises MPI after the interpreter's exit handlers;
    after a rank's death, the process ends here instead, with exit code 1.
    """
    module = sys.modules["mpi4py.MPI"]
    if module.Is_finalized():
        return
    if _initialised_here() and not _given_up:
        module.Finalize()
    elif _given_up and not _initialised_here():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _initialised_here() -> bool:
    """Return whether this package, not the script, has initialised MPI."""
    # Stored in mpi4py, because every later start_mpi() finds mpi4py already imported.
    return sys.modules["mpi4py"].rc.finalize is False


def _require_connected(module: Any, environ: Mapping[str, str]) -> None:
    """Raise if the launcher has started more ranks than MPI has connected."""
    if env.get("QSGD_ALLOW_SINGLETON", environ):
        return
    vendor, version = module.get_vendor()
    is_open_mpi = vendor in OPEN_MPI_VENDORS
    size = module.COMM_WORLD.Get_size()
    claim = broken_claim(size, claims(environ, is_open_mpi=is_open_mpi))
    if claim is not None:
        name = f"{vendor} {'.'.join(map(str, version))}"
        path = loaded_library()
        mpi = LoadedMpi(name, is_open_mpi, path, pip_package(path))
        if size == 1 and _initialised_here():
            module.Finalize()  # does not block, as there is no other rank; frees shared memory
        raise UsageError(not_connected(size, claim, mpi, rank_of(environ)))


def _import_mpi(first: bool) -> Any:
    try:
        import mpi4py

        if first:
            mpi4py.rc.finalize = False  # finalise() decides
            if not _RDMA_DEVICES.exists():
                # Open MPI would use UCX for the shared window, and UCX prints a warning if there
                # is no device.
                os.environ.setdefault("OMPI_MCA_osc", "^ucx")
            if under_pmi2_of_slurm(os.environ) and is_installed("mpich"):
                os.environ.update({**SHORT_ADDRESSES, **os.environ})
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(f"no MPI library can be loaded ({error}); {no_mpi(os.environ)}") from None
    return MPI


def _pointer_handles(module: Any, library: str) -> bool:
    """Return whether handles are pointers (Open MPI, MPI 5's ABI), not ints (MPICH derivatives)."""
    width = module._sizeof(module.COMM_WORLD)
    found = {4: "int", 8: "pointer"}[width]
    vendor, _ = module.get_vendor()
    chosen = env.get("QSGD_MPI_ABI")
    if chosen is None and vendor not in KNOWN_VENDORS:
        raise UsageError(
            f"unknown MPI library: {library} (vendor {vendor!r}). Known vendors: "
            f"{', '.join(sorted(KNOWN_VENDORS))}. Its handles have {width} bytes; set "
            f"QSGD_MPI_ABI={found} to try it, and check the results with the contract tests."
        )
    if chosen not in (None, found):
        raise UsageError(
            f"QSGD_MPI_ABI={chosen}, but the handles of {library} have {width} bytes; unset it"
        )
    return found == "pointer"


@dataclass(frozen=True)
class Layout:
    """The ranks of each node, and this rank's position."""

    nodes: list[list[int]]
    """The ranks of each node, ascending; rank 0's node first."""
    rank: int

    @property
    def node(self) -> list[int]:
        """The ranks of this rank's node."""
        return next(ranks for ranks in self.nodes if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.node.index(self.rank)

    @property
    def across(self) -> list[int]:
        """The ranks with this rank's local rank, one per node, ascending."""
        local = self.local_rank
        return sorted(ranks[local] for ranks in self.nodes if local < len(ranks))

    @property
    def homogeneous(self) -> bool:
        """Whether every node has equally many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1


def find_layout(mpi: Mpi, comm: Any, ranks_per_node: int | None) -> Layout:
    """Return which ranks share a node; collective over ``comm``.

    A node is a set of ranks that share memory, or, if ``ranks_per_node`` is given, that many
    consecutive ranks.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if ranks_per_node is not None:
        firsts = [r - r % ranks_per_node for r in range(size)]
    else:
        local = comm.Split_type(mpi.module.COMM_TYPE_SHARED, key=rank)
        first = array("i", [local.bcast(rank)])
        local.Free()
        gathered = array("i", bytes(size * first.itemsize))
        comm.Allgather([first, mpi.module.INT], [gathered, mpi.module.INT])
        firsts = list(gathered)
    nodes: dict[int, list[int]] = {}
    for each, its_first in enumerate(firsts):
        nodes.setdefault(its_first, []).append(each)
    return Layout(sorted(nodes.values()), rank)


def holds_everywhere(comm: Any, holds: bool) -> bool:
    """Return whether ``holds`` is true on every rank; collective over ``comm``.

    Reduces one integer: comm.allreduce() would pickle, and send several messages per step.
    """
    lacking, lacking_in_all = array("i", [not holds]), array("i", [0])
    comm.Allreduce(lacking, lacking_in_all)
    return lacking_in_all[0] == 0


def core_facts(mpi: Mpi, comm: Any) -> Any:
    """Return the _core.MpiFacts that the core needs to send messages over ``comm``."""
    import qsgd_hpc._core as _core

    module = mpi.module
    return _core.MpiFacts(
        module_path=module.__file__,
        library=mpi.library,
        pointer_handles=mpi.pointer_handles,
        comm=module._handleof(comm),
        byte_type=module._handleof(module.BYTE),
        rank=comm.Get_rank(),
        size=comm.Get_size(),
    )


def _shared_memory_free() -> int:
    """Return the free bytes of /dev/shm, used for shared windows; containers often have 64 MB."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


def share_node(mpi: Mpi, comm: Any, layout: Layout) -> tuple[Any, Any]:
    """Allocate the memory that the ranks of a node share; collective over ``comm``.

    Returns:
        A _core.NodeFacts and the MPI window that owns the memory, which all ranks of the node must
        free together; (None, None) on every rank if any rank could not allocate its part.
    """
    import qsgd_hpc._core as _core

    module = mpi.module
    local = comm.Split(layout.node[0], key=layout.rank)
    # Check first, because in Open MPI the other ranks wait forever if one cannot allocate.
    needed_bytes = local.Get_size() * (_core.REGION_BYTES + _ALIGNMENT)
    window: Any = None
    if holds_everywhere(local, _shared_memory_free() >= needed_bytes):
        # Without the hint, all regions would be one block on the first rank's memory controller.
        info = module.Info.Create({"alloc_shared_noncontig": "true"})
        with contextlib.suppress(module.Exception):  # /dev/shm may have filled up meanwhile
            window = module.Win.Allocate_shared(_core.REGION_BYTES + _ALIGNMENT, 1, info, local)
        info.Free()
    if not holds_everywhere(comm, window is not None):
        if window is not None:
            window.Free()
        local.Free()
        return None, None
    bases = [
        -(-window.Shared_query(r)[0].address // _ALIGNMENT) * _ALIGNMENT
        for r in range(local.Get_size())
    ]
    own, _ = window.Shared_query(local.Get_rank())
    own[:] = bytes(len(own))
    local.Barrier()
    local.Free()
    return _core.NodeFacts(nodes=layout.nodes, bases=bases), window


def communicators(mpi: Mpi, comm: Any) -> tuple[Any, list[Any]]:
    """Return this package's own communicator of the job, and those that become process sets.

    Args:
        mpi: the MPI of this process.
        comm: None or an empty list for all ranks that the launcher started; an mpi4py communicator;
            a list of ranks of MPI.COMM_WORLD, passed by those ranks alone; or a list of
            communicators, of which the first is the job.

    Raises:
        UsageError: it is none of these, or this rank is not in it.
    """
    listed = list(comm) if isinstance(comm, Sequence) else None
    sets: list[Any] = []
    if comm is None or listed == []:
        own = mpi.module.COMM_WORLD.Dup()
    elif listed is None:
        own = _duplicate(mpi, comm)
    elif all(hasattr(each, "Dup") for each in listed):
        first, *sets = listed
        own = _duplicate(mpi, first)
    else:
        own = _of_ranks(mpi, listed)
    own.Set_errhandler(mpi.module.ERRORS_RETURN)
    return own, sets


def _duplicate(mpi: Mpi, comm: Any) -> Any:
    if not hasattr(comm, "Dup"):
        raise UsageError(f"init(comm={comm!r}): {_EXPECTED}")
    if comm == mpi.module.COMM_NULL:
        raise UsageError(
            f"rank {mpi.module.COMM_WORLD.Get_rank()} of the launched ranks passed "
            "MPI.COMM_NULL to init: it belongs to no job and must not call init"
        )
    return comm.Dup()


def _of_ranks(mpi: Mpi, ranks: list[Any]) -> Any:
    world = mpi.module.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    wrong = [r for r in ranks if not isinstance(r, Integral) or isinstance(r, bool)]
    if wrong or len(set(ranks)) < len(ranks) or not all(0 <= r < size for r in ranks):
        raise UsageError(
            f"init(comm={ranks!r}): {_EXPECTED}; ranks are 0 to {size - 1}, each named once"
        )
    if rank not in ranks:
        raise UsageError(
            f"rank {rank} called init(comm={ranks!r}) but is not in that list: only the ranks "
            "in the list form the job; on other ranks, pass their list or do not call init"
        )
    group = world.Get_group().Incl([int(r) for r in ranks])
    own = world.Create_group(group)  # collective over the ranks in the group alone
    group.Free()
    return own
