"""Collectives over JAX arrays: on concrete ones, blocking and asynchronous, and inside ``jit``."""

from __future__ import annotations

from qsgd_hpc.jax.ops import _moving, _reducing
from qsgd_hpc.jax.ops._moving import *
from qsgd_hpc.jax.ops._reducing import *
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import barrier, poll, synchronize

__all__ = ["barrier", "join", "poll", "synchronize"]
__all__ += _moving.__all__
__all__ += _reducing.__all__


def join() -> int:
    """Say that this rank has no more batches; return, when all have said so, who was last.

    Until then it takes part in the others' allreduces with zeros, which count in averages.
    Every other collective raises on the ranks that are still at it.
    """
    return ops.join()
