"""Collectives over numpy arrays without the engine: for benchmarks, the planner and tutorials.

Every rank must call the same collective with the same arguments, in the same order: nothing is
negotiated, so ranks that disagree wait for each other until the job ends.
"""

from __future__ import annotations

import atexit
import sys
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.errors import RankFailedError
from qsgd_hpc.runtime import basics, lifeline, mpi_binding

__all__ = ["Communicator", "communicator"]

_at_exit = False


class Communicator:
    """A ``_core.Communicator`` and its MPI resources; ``close`` is collective."""

    def __init__(self, core: Any, comm: Any, node: Any, window: Any, peers: lifeline.Peers) -> None:
        self.core = core
        self.comm = comm
        """This communicator's own duplicate (mpi4py)."""
        self.nodes: list[list[int]] | None = None if node is None else node.nodes
        """Ranks that share memory with each other."""
        self._window = window
        self._peers = peers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, RankFailedError):
            mpi_binding.give_up()

    def close(self) -> None:
        """Free all resources; collective."""
        if self.comm is None:
            return
        self.comm.Barrier()  # no rank may see another leave while it still communicates
        self.core.close()
        lifeline.forget(self._peers)
        if self._window is not None:
            self._window.Free()
        self.comm.Free()
        self.comm = self._window = None


def communicator(comm: Any = None, threads: int | None = None, shared: bool = True) -> Communicator:
    """Build a communicator for direct calls; collective over ``comm``.

    Args:
        comm: an mpi4py communicator; default is all ranks that the launcher started.
        threads: number of coding threads on this rank, including the caller; default 1.
        shared: use memory shared by the ranks of a node, if it can be allocated.

    Raises:
        UsageError: no usable MPI, or an invalid QSGD_* variable.
    """
    global _at_exit
    import qsgd_hpc._core as _core

    mpi = mpi_binding.start_mpi()
    own = (mpi.module.COMM_WORLD if comm is None else comm).Dup()
    own.Set_errhandler(mpi.module.ERRORS_RETURN)
    layout = mpi_binding.find_layout(mpi, own, env.get("QSGD_RANKS_PER_NODE"))
    node, window = mpi_binding.share_node(mpi, own, layout) if shared else (None, None)
    core = _core.Communicator.over_mpi(mpi_binding.core_facts(mpi, own), node, threads or 1)
    tree = _core.Tree(own.Get_rank(), own.Get_size(), layout.nodes, env.get("QSGD_FAN_OUT"))
    peers = lifeline.connect(own, tree) if env.get("QSGD_LIFELINE") else []
    if peers:
        core.watch(peers, basics.GRACE_S)
    if not _at_exit:
        atexit.register(_end)
        _at_exit = True
    return Communicator(core, own, node, window, peers)


def _end() -> None:
    """At exit: finalise MPI, unless the engine still runs: its own exit handler does so."""
    if isinstance(getattr(sys, "last_value", None), RankFailedError):
        mpi_binding.give_up()
    if not basics.is_initialized():
        mpi_binding.finalise()
