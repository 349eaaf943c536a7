"""Check a request, find its MPI, and run it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.command import Command, Machine, build_command
from qsgd_hpc.launch.cores import usable_cores
from qsgd_hpc.launch.meeting import Meeting, meeting, remarks, without_outer_launch
from qsgd_hpc.launch.mpi import Family, Launcher, Library, find_launcher, find_library
from qsgd_hpc.launch.options import RunOptions, check_options
from qsgd_hpc.launch.program import resolve_command, stdin_program_at, with_program
from qsgd_hpc.launch.session import Session, say

__all__ = ["Plan", "plan", "run"]


@dataclass(frozen=True)
class Plan:
    """A checked request with its MPI library and the mpiexec that belongs to it."""

    options: RunOptions
    library: Library
    launcher: Launcher

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the ranks inherit."""
        return without_outer_launch(os.environ)

    def command(self, token: str = "-", place: Meeting | None = None) -> Command:
        """Return the command line; with a token other than "-", the output consists of frames."""
        machine = Machine(usable_cores(), os.geteuid() == 0)
        return build_command(
            self.options, self.launcher, machine, self.environ, token=token, meeting=place
        )


def plan(options: RunOptions) -> Plan:
    """Check a request, find its MPI, and read the program from stdin, if Python reads it there.

    Raises:
        UsageError: all errors of the request, one per line.
    """
    faults = check_options(options)
    faults += _faulty_variables({**os.environ, **options.env})
    try:
        options = replace(options, command=resolve_command(options.command))
    except UsageError as error:
        faults.append(str(error))
    if faults:
        raise UsageError("\n".join(faults))
    at = stdin_program_at(options.command)
    if at is not None:
        stdin = getattr(sys.stdin, "buffer", None)
        options = replace(options, command=with_program(options.command, at, stdin))
    library = find_library()
    launcher = find_launcher(library)
    if options.network is not None:
        if launcher.family not in (Family.HYDRA, Family.OPEN_MPI):
            raise UsageError(
                "--network starts ranks with the mpiexec of MPICH or Open MPI; here it is "
                f"{launcher.path} ({launcher.family.value}). pip install 'qsgd-hpc[mpich]' "
                "installs one."
            )
        trial(options.network, len(options.nodes))
    return Plan(options, library, launcher)


def _faulty_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the errors of QSGD_* variables, so that they are reported once, not on every rank."""
    faults = []
    for name in env.TABLE:
        try:
            env.get(name, environ)
        except UsageError as error:
            faults.append(str(error))
    return faults


def run(options: RunOptions) -> int:
    """Start the ranks, wait for them, and return the exit code for the shell.

    Every rank's stdin is /dev/null; with ``python -``, each rank gets the program. The exit code is
    the first failing rank's, or 128 + signal if a signal killed it; 130 after Ctrl-C, 143 after
    SIGTERM.

    Raises:
        UsageError: the request is invalid, or there is no MPI.
    """
    checked = plan(options)
    if options.verbose:
        say(f"MPI: {checked.library.name}, {checked.library.path}")
        say(f"mpiexec: {checked.launcher.path} ({checked.launcher.version})")
    token = secrets.token_hex(4)
    for remark in remarks(checked.options, checked.environ):
        say(remark)
    session = Session(
        checked.options,
        checked.launcher,
        token,
        grace_s=env.get("QSGD_RUN_GRACE_S"),
        warning_s=env.get("QSGD_STALL_WARNING_S"),
    )
    with meeting(checked.options, os.environ) as place:
        return session.run(checked.command(token, place), checked.environ)
