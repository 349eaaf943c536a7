"""Errors that users can encounter, and the exit code that requests another job.

Each message contains the fault, the values, the rank and the remedy.
"""

from typing import TYPE_CHECKING

__all__ = [
    "EXIT_RESUBMIT",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LaunchError",
    "NonFiniteGradientError",
    "QsgdError",
    "RankFailedError",
    "UnsupportedError",
    "UsageError",
]

EXIT_RESUBMIT = 85
"""Exit code of a training that stopped at a checkpoint and is to be submitted again."""


class QsgdError(Exception):
    """Base class of all errors of this package."""

    # Exception's constructor, not that of ValueError or RuntimeError: TensorFlow re-raises errors
    # of a traced function in their own class only if the class has this constructor.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class UsageError(QsgdError, ValueError):
    """An invalid request; the command line prints it without a traceback.

    The message may contain several errors, one per line.
    """


class UnsupportedError(UsageError, NotImplementedError):
    """An operation that is not supported for its values, such as a maximum of sparse tensors."""


class LaunchError(QsgdError, RuntimeError):
    """A job or a rank could not be started."""


class HorovodInternalError(QsgdError, RuntimeError):
    """A collective failed. Every rank of the job gets the same message."""


class RankFailedError(HorovodInternalError):
    """Another rank died, or left the job while this rank still needed it."""


class NonFiniteGradientError(HorovodInternalError):
    """A tensor contained NaN or Inf; the message names the tensor and the ranks."""


class HostsUpdatedInterrupt(QsgdError, RuntimeError):
    """Raised by a script in ``elastic.run`` to form the job again without losing its state.

    This package never raises it: a batch job's hosts do not change.

    Args:
        skip_sync: whether the ranks' states are equal, so that they need not be synchronised.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the job's hosts were updated")
        self.skip_sync = skip_sync
