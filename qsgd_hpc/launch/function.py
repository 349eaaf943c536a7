"""Run a Python function on several ranks and return the results.

The launcher is imported in the call, because training scripts import this function with their
framework's module and seldom call it.

``python -m qsgd_hpc.launch.function``, with QSGD_RUN_FUNCTION set, is the program of a rank: it
fetches the call, executes it, and returns the result.
"""

from __future__ import annotations

import os
import pickle
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["main", "run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    *,
    num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
    bits: int | str | None = None,
    mpi_args: str | Sequence[str] = (),
    network_interfaces: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    start_timeout: float | None = None,
    verbose: bool | int | None = False,
    **horovods: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on every rank of a new job.

    Args:
        func: any function, including closures and lambdas; it and its results are sent by
            cloudpickle.
        np: number of ranks; ``num_proc`` is an alias.
        hosts: ``h1:2,h2:2``; default is this machine.
        hostfile: a file of hosts, instead of ``hosts``.
        env: variables for the ranks.
        bits: bits per gradient element; see ``qsgd-hpc run --bits``.
        mpi_args: additional options for mpiexec.
        network_interfaces: ``eth0,...``: the network interfaces to use; ``network_interface`` is
            an alias.
        executable: the ranks' Python; default is this one.
        output_filename: folder for the ranks' output: rank.N/stdout and rank.N/stderr.
        start_timeout: time limit for the start of the ranks, in seconds.
        verbose: print the MPI in use.
        horovods: arguments of Horovod that have no effect here (use_mpi, ssh_port, ...).

    Returns:
        The results by rank.
    Raises:
        LaunchError: a rank failed; the message has its traceback, and the cause is its exception.
        UsageError: the request is invalid, or this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("qsgd_hpc.run: call it in the main thread, which receives signals")

    from qsgd_hpc.launch.exchange import VARIABLE, Exchange
    from qsgd_hpc.launch.horovod_flags import unused_arguments
    from qsgd_hpc.launch.options import RunOptions, chosen_hosts
    from qsgd_hpc.launch.run import run as launch
    from qsgd_hpc.launch.run import say

    for remark in unused_arguments(horovods):
        say(remark)
    ranks = np if num_proc is None else num_proc
    exchange = Exchange((func, tuple(args), dict(kwargs or {})))
    options = RunOptions(
        ranks=ranks,
        command=(executable or sys.executable, "-m", "qsgd_hpc.launch.function"),
        hosts=chosen_hosts(hosts, None if hostfile is None else Path(hostfile)),
        bits=bits,
        env={**(env or {}), VARIABLE: exchange.address},
        mpi_args=tuple(shlex.split(mpi_args) if isinstance(mpi_args, str) else mpi_args),
        network_interfaces=tuple(
            filter(None, (network_interfaces or network_interface or "").split(","))
        ),
        horovod=_horovod_installed(),
        output_folder=None if output_filename is None else Path(output_filename),
        start_timeout_s=start_timeout,
        verbose=bool(verbose),
    )
    with exchange:
        code = launch(options)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    return exchange.results(ranks, code)


def _horovod_installed() -> bool:
    """Return whether ``horovod`` is this package in this process."""
    compat = sys.modules.get("qsgd_hpc.horovod_compat")
    return compat is not None and compat.installed()


def main() -> None:
    """Run one rank; an exception of the function is sent to the launching process and re-raised."""
    from qsgd_hpc import env
    from qsgd_hpc.launch.exchange import VARIABLE, Failure, Returned, answer, dumps_by_value, fetch
    from qsgd_hpc.launch.supervise import launched_rank

    sock, (func, args, kwargs) = fetch(env.get(VARIABLE), launched_rank())
    try:
        result = Returned(func(*args, **kwargs))
        dumps_by_value(result)
    except BaseException as error:
        try:
            exception = dumps_by_value(error)
            pickle.loads(exception)  # some exceptions can be pickled, but not unpickled
        except Exception:
            exception = None
        answer(sock, Failure("".join(traceback.format_exception(error)), exception))
        raise
    answer(sock, result)


if __name__ == "__main__":
    main()
