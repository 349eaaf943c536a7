"""The errors a user can meet. Each message says what, which values, which rank, and the remedy."""

__all__ = [
    "HorovodInternalError",
    "LaunchError",
    "NonFiniteGradientError",
    "QsgdError",
    "RankFailedError",
    "UsageError",
]


class QsgdError(Exception):
    """Root of everything that this package raises on purpose."""


class UsageError(QsgdError, ValueError):
    """The caller asked for something that cannot be: the command line prints it without traceback.

    Several faults may be reported at once, one per line.
    """


class LaunchError(QsgdError, RuntimeError):
    """A job or a rank could not be started."""


class HorovodInternalError(QsgdError, RuntimeError):
    """A collective failed. Every rank of the job gets the same message."""


class RankFailedError(HorovodInternalError):
    """Another rank died or left while this one still needed it."""


class NonFiniteGradientError(HorovodInternalError):
    """A tensor held NaN or Inf; the message names the tensor and the ranks."""
