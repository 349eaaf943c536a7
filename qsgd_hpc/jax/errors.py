"""The errors of collectives inside compiled programs, which JAX raises as its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from qsgd_hpc import errors

__all__ = ["translated_errors"]

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
