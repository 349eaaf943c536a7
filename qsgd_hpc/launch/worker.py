"""The program of a rank of ``qsgd_hpc.run``: fetch the call, execute it, and return the result.

Usage: python -m qsgd_hpc.launch.worker, with QSGD_RUN_FUNCTION set.
"""

from __future__ import annotations

import pickle
import traceback

from qsgd_hpc import env
from qsgd_hpc.launch.exchange import VARIABLE, Failure, Returned, answer, dumps_by_value, fetch
from qsgd_hpc.launch.supervise import launched_rank

__all__ = ["main"]


def main() -> None:
    """Run one rank; an exception of the function is sent to the launching process and re-raised."""
    sock, (func, args, kwargs) = fetch(env.get(VARIABLE), launched_rank())
    try:
        result = Returned(func(*args, **kwargs))
        dumps_by_value(result)
    except BaseException as error:
        answer(sock, _failure(error))
        raise
    answer(sock, result)


def _failure(error: BaseException) -> Failure:
    try:
        exception = dumps_by_value(error)
        pickle.loads(exception)  # some exceptions can be pickled, but not unpickled
    except Exception:
        exception = None
    return Failure("".join(traceback.format_exception(error)), exception)


if __name__ == "__main__":
    main()
