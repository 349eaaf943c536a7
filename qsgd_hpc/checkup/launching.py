"""What starts ranks: MPI and its mpiexec, the shell's variables of torchrun, emulated hosts."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import find_host
from qsgd_hpc.launch.claims import no_mpi
from qsgd_hpc.launch.cluster import Network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.cluster.links import ClusterError
from qsgd_hpc.launch.meeting import meeting, taken_port
from qsgd_hpc.launch.mpi import Library, find_launcher, find_library
from qsgd_hpc.launch.options import RunOptions

__all__ = ["emulated_network", "mpi", "torchrun"]

TORCHRUN = "torchrun"
# Variables of one rank; a script started without `run` reads them from the shell.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def torchrun() -> list[Finding]:
    """Find the address at which ranks would meet, and conflicting variables."""
    if find_spec("torch") is None:
        return []
    try:
        with meeting(RunOptions(2, ("script.py",)), os.environ) as place:
            where = f"{place.address}, port {place.port}" if place else ""
    except (OSError, UsageError) as error:
        return [note(TORCHRUN, f"no address at which ranks could meet: {error}")]
    text = "ranks of `run` and of jobs get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..., and meet"
    given = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT")
             if name in os.environ]  # fmt: skip
    if given:
        remedy = "Unset it, unless ranks should meet there: `run` chooses an address automatically."
        found = [note(TORCHRUN, f"{text} at this shell's {', '.join(given)}", remedy)]
    else:
        found = [ok(TORCHRUN, f"{text} at {where}")]
    if (taken := taken_port(os.environ)) is not None:
        found.append(note(TORCHRUN, taken, "Unset MASTER_PORT: `run` reserves a free port."))
    stale = [f"{name}={os.environ[name]}" for name in OF_A_RANK if name in os.environ]
    if stale:
        found.append(
            note(
                TORCHRUN,
                f"{', '.join(stale)} in this shell: `run` overwrites it, but a script started "
                "without `run` uses this rank and waits for the others",
                f"unset {' '.join(word.partition('=')[0] for word in stale)}",
            )
        )
    return found


def mpi() -> list[Finding]:
    """Find the MPI library and its launcher."""
    try:
        library = find_library()
    except UsageError as error:
        text = no_mpi(os.environ)
        return [fault("MPI", str(error).removesuffix(f"; {text}"), f"{text[0].upper()}{text[1:]}.")]
    where = f", {library.path}" if library.path else ""
    return [ok("MPI", f"{library.name}{where}"), *_launcher(library)]


def _launcher(library: Library) -> list[Finding]:
    try:
        launcher = find_launcher(library)
    except UsageError as error:
        if find_host().schedulers:
            remedy = "Jobs use the site's launcher; `qsgd-hpc run` needs one here."
            return [note("launcher", str(error), remedy)]
        return [fault("launcher", str(error), "`qsgd-hpc run` cannot start ranks without it.")]
    found = [ok("launcher", f"{launcher.version}, {launcher.path}")]
    first = shutil.which("mpiexec")
    if first and Path(first).resolve() != launcher.path.resolve():
        found.append(
            note(
                "launcher",
                f"{first} is first on PATH and does not belong to {library.name}",
                f"Start ranks with `qsgd-hpc run` or {launcher.path}.",
            )
        )
    return found


NETWORK = "--network"
PLAIN = Network(rate_bits_s=10**9)
SLOW = Network(rate_bits_s=10**9, latency_us=50.0)


def emulated_network() -> list[Finding]:
    """Create two emulated hosts and remove them; then two with a latency between them."""
    try:
        trial(PLAIN, 2)
    except ClusterError as error:
        return [_network_note(str(error))]
    try:
        trial(SLOW, 2)
    except ClusterError as error:
        return [
            ok(NETWORK, "emulated hosts with a link rate are available"),
            _network_note(str(error)),
        ]
    return [ok(NETWORK, "emulated hosts with a link rate and a latency are available")]


def _network_note(text: str) -> Finding:
    why, _, remedy = text.removeprefix(NETWORK).lstrip(": ").rpartition("; ")
    return note(NETWORK, why or remedy, remedy if why else "")
