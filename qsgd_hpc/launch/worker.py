"""The program of a rank of ``qsgd_hpc.run``: fetches the call, runs it, and returns the result.

Usage: python -m qsgd_hpc.launch.worker, with QSGD_RUN_FUNCTION set.
"""

from __future__ import annotations

import pickle
import traceback

from qsgd_hpc import env
from qsgd_hpc.launch import pickles
from qsgd_hpc.launch.exchange import VARIABLE, Failure, Returned, answer, fetch
from qsgd_hpc.launch.supervise import launched_rank

__all__ = ["main"]


def main() -> None:
    """Run one rank; what the function raises goes to the launching process and on from here."""
    sock, (func, args, kwargs) = fetch(env.get(VARIABLE), launched_rank())
    try:
        result = Returned(func(*args, **kwargs))
        pickles.dumps(result)
    except BaseException as error:
        answer(sock, _failure(error))
        raise
    answer(sock, result)


def _failure(error: BaseException) -> Failure:
    try:
        exception = pickles.dumps(error)
        pickle.loads(exception)  # some can be pickled but not restored
    except Exception:
        exception = None
    return Failure("".join(traceback.format_exception(error)), exception)


if __name__ == "__main__":
    main()
