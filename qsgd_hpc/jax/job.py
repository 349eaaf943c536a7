"""``init`` and ``shutdown``, which account for JAX's asynchronous execution."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["init", "shutdown"]

_at_exit = False


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Start the engine. Does nothing if it is already running.

    Args:
        comm: the ranks of the job: an mpi4py communicator; a list of the
            launched ranks; or a list of communicators, the first for the job and the others as
            process sets. Default: all launched ranks.
        process_sets: sets to register, the same on every rank; or "dynamic", which allows sets to
            be added and removed later.

    Raises:
        UsageError: no usable MPI, a QSGD_* variable that is invalid or differs between ranks, or an
            invalid communicator or process set.
    """
    global _at_exit
    basics.init(comm, process_sets)
    if not _at_exit:
        # Runs before the exit handler of basics.init: other ranks may need this rank's last step.
        atexit.register(_finish_programs)
        _at_exit = True


def shutdown() -> None:
    """Leave the job after the called programs have finished; return when every rank has left."""
    _finish_programs()
    basics.shutdown()


def _finish_programs() -> None:
    """Wait until no program runs on this rank's devices, unless it ends with an error."""
    if not basics.is_initialized() or hasattr(sys, "last_value"):
        return
    # A script that has not kept its results may still be computing them. A device executes the
    # programs of a thread in the order of their calls, so this one is the last.
    last_programs = [jax.jit(jnp.negative)(jax.device_put(0, d)) for d in jax.local_devices()]
    live_arrays: Any = jax.live_arrays
    for array in [*last_programs, *live_arrays()]:
        try:
            array.block_until_ready()
        except (jax.errors.JaxRuntimeError, RuntimeError):
            continue  # a later reader gets the error; it may also be donated
