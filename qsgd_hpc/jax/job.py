"""What JAX's asynchronous execution requires: ``init``, ``shutdown``, translated errors."""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qsgd_hpc import errors
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["init", "shutdown", "translated_errors"]

_at_exit = False


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    global _at_exit
    basics.init(comm, process_sets)
    if not _at_exit:
        # Runs before the exit handler of basics.init: other ranks may need this rank's last step.
        atexit.register(_finish_programs)
        _at_exit = True


init.__doc__ = basics.init.__doc__


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


_KINDS = ("HorovodInternalError", "RankFailedError", "NonFiniteGradientError", "UsageError")
_TEXT = re.compile(rf"\b({'|'.join(_KINDS)}): (.*)", re.DOTALL)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the original error of a collective inside a compiled program.

    A compiled program that fails raises ``jax.errors.JaxRuntimeError`` in any case, or
    ``ValueError`` if it fails before the call of a program that ran before returns;
    its text begins with the name of the original error. Around the call of such a program, and
    around the wait for its results, this context raises the original error instead::

        with hvd.translated_errors():
            params, state = jax.block_until_ready(step(params, state, batch))

    Raises:
        HorovodInternalError: or a subclass, such as NonFiniteGradientError.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        found = _TEXT.search(str(error))
        if found is None or isinstance(error, errors.UsageError):
            raise
        raise getattr(errors, found[1])(found[2]) from error
