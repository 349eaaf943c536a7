"""The errors of collectives: each is an error of both this package and TensorFlow.

TensorFlow converts a collective's status to an error: in eager mode, functions and sessions.
Scripts can catch either class: ``hvd.HorovodInternalError`` or TensorFlow's class for the status.
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

# Text that TensorFlow adds to the message of an eager operation.
_PREFIX = re.compile(r"^\{\{function_node __wrapped__[^}]*\}\}\s*")
_SUFFIX = re.compile(r"\s*\[Op:Qsgd\w+\].*$", re.DOTALL)
# Every message names the operation that failed.
_OWN = re.compile(r"\bQsgd(Allreduce|Broadcast|Allgather|Reducescatter|Alltoall|Join)(?![a-z])")


class _Both:
    """First base class, whose constructor accepts the arguments of both other bases."""

    _status: type[tf.errors.OpError]

    # AutoGraph uses the names of these arguments; Keras passes only the text.
    def __init__(self, node_def: Any, op: Any = None, message: Any = None, *args: Any) -> None:
        if message is None:
            node_def, message = None, str(node_def)
        text = _SUFFIX.sub("", _PREFIX.sub("", message))
        self._status.__init__(self, node_def, op, text, *args)  # type: ignore[misc]


class HorovodInternalError(_Both, errors.HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks disagree."""

    _status = tf.errors.FailedPreconditionError


class RankFailedError(_Both, errors.RankFailedError, tf.errors.UnknownError):  # type: ignore[misc]
    """Another rank died or left."""

    _status = tf.errors.UnknownError


class NonFiniteGradientError(_Both, errors.NonFiniteGradientError, tf.errors.DataLossError):  # type: ignore[misc]
    """A tensor contained NaN or Inf."""

    _status = tf.errors.DataLossError


class UsageError(_Both, errors.UsageError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """The call itself is invalid, such as splits that do not fit its tensor."""

    _status = tf.errors.InvalidArgumentError


def make_own_errors() -> None:
    """Make TensorFlow raise errors of these classes for this package's operations.

    TensorFlow chooses a class by the status only, in several places of Python and C++. They all
    call the class's ``__new__``, which is replaced here by one that also checks the message.
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
