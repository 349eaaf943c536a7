"""Collectives over JAX arrays: on concrete ones, blocking and asynchronous, and inside ``jit``."""

from __future__ import annotations

from qsgd_hpc.jax.ops import _moves, _reductions
from qsgd_hpc.jax.ops._moves import *
from qsgd_hpc.jax.ops._reductions import *
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import barrier, poll, synchronize

__all__ = ["barrier", "join", "poll", "synchronize", *_moves.__all__, *_reductions.__all__]


def join() -> int:
    """Announce that this rank has no more batches; return the last rank when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.
    """
    return ops.join()
