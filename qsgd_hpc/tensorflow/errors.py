"""The errors of collectives: each is an error of both this package and TensorFlow.

TensorFlow makes an error of a collective's status: eagerly, in a function and in a session. Scripts
catch either class, ``hvd.HorovodInternalError`` or the one that TensorFlow has for such a status.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from qsgd_hpc import errors

__all__ = [
    "HorovodInternalError",
    "NonFiniteGradientError",
    "RankFailedError",
    "UsageError",
    "make_own_errors",
]

# What TensorFlow puts around the message of an eager operation.
_PREFIX = re.compile(r"^\{\{function_node __wrapped__[^}]*\}\}\s*")
_SUFFIX = re.compile(r"\s*\[Op:Qsgd\w+\].*$", re.DOTALL)
# Every message names the operation that failed.
_OWN = re.compile(r"\bQsgd(Allreduce|Broadcast|Allgather|Reducescatter|Alltoall|Join)(?![a-z])")


class _Both:
    """Base class that precedes both classes."""

    _status: type[tf.errors.OpError]

    # AutoGraph looks at the names of these arguments; Keras passes the text alone.
    def __init__(self, node_def: Any, op: Any = None, message: Any = None, *args: Any) -> None:
        if message is None:
            node_def, message = None, str(node_def)
        text = _SUFFIX.sub("", _PREFIX.sub("", message))
        self._status.__init__(self, node_def, op, text, *args)


class HorovodInternalError(_Both, errors.HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks disagree."""

    _status = tf.errors.FailedPreconditionError


class RankFailedError(_Both, errors.RankFailedError, tf.errors.UnknownError):  # type: ignore[misc]
    """Another rank died or left."""

    _status = tf.errors.UnknownError


class NonFiniteGradientError(_Both, errors.NonFiniteGradientError, tf.errors.DataLossError):  # type: ignore[misc]
    """A tensor held NaN or Inf."""

    _status = tf.errors.DataLossError


class UsageError(_Both, errors.UsageError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """The call itself is invalid, such as splits that do not fit its tensor."""

    _status = tf.errors.InvalidArgumentError


def make_own_errors() -> None:
    """Make TensorFlow raise errors of these classes for this package's operations.

    TensorFlow chooses a class by the status only, in several places of Python and C++. All of them
    call the class, where the message then decides.
    """
    for own in (HorovodInternalError, RankFailedError, NonFiniteGradientError, UsageError):
        own._status.__new__ = _choosing(own)


def _choosing(own: Any) -> Any:
    status = own._status

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        message = kwargs.get("message", args[2] if len(args) > 2 else "")
        chosen = own if cls is status and _OWN.search(str(message)) else cls
        return Exception.__new__(chosen, *args)

    return new
