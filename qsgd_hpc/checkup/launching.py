"""What starts ranks and jobs: MPI, torchrun, emulated hosts, the site, the folder of jobs."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.env import home
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import choose, find_host, load, names
from qsgd_hpc.jobs.sites.files import dotted, merged, package_faults, unconfirmed
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.claims import no_mpi
from qsgd_hpc.launch.cluster import Network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.cluster.links import ClusterError
from qsgd_hpc.launch.mpi import Library, find_launcher, find_library
from qsgd_hpc.launch.options import RunOptions
from qsgd_hpc.launch.rendezvous import rendezvous, taken_port
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["emulated_network", "job_folder", "mpi", "site", "torchrun"]

TORCHRUN = "torchrun"
# Variables of one rank; a script started without `run` reads them from the shell.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def torchrun() -> list[Finding]:
    """Find the address at which ranks would meet, and conflicting variables."""
    if find_spec("torch") is None:
        return []
    try:
        with rendezvous(RunOptions(2, ("script.py",)), os.environ) as place:
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
        text = (
            f"{', '.join(stale)} in this shell: `run` overwrites it, but a script started "
            "without `run` uses this rank and waits for the others"
        )
        remedy = f"unset {' '.join(word.partition('=')[0] for word in stale)}"
        found.append(note(TORCHRUN, text, remedy))
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
        text = f"{first} is first on PATH and does not belong to {library.name}"
        remedy = f"Start ranks with `qsgd-hpc run` or {launcher.path}."
        found.append(note("launcher", text, remedy))
    return found


NETWORK = "--network"
PLAIN = Network(rate_bits_s=10**9)
SLOW = Network(rate_bits_s=10**9, latency_us=50.0)


def emulated_network() -> list[Finding]:
    """Create two emulated hosts and remove them; then two with a latency between them."""
    found: list[Finding] = []
    for network, what in ((PLAIN, "a link rate"), (SLOW, "a link rate and a latency")):
        try:
            trial(network, 2)
        except ClusterError as error:
            return [*found, _network_note(str(error))]
        found = [ok(NETWORK, f"emulated hosts with {what} are available")]
    return found


def _network_note(text: str) -> Finding:
    why, _, remedy = text.removeprefix(NETWORK).lstrip(": ").rpartition("; ")
    return note(NETWORK, why or remedy, remedy if why else "")


def site() -> list[Finding]:
    """Return the site chosen on this machine, and a fault for each invalid profile."""
    found = []
    try:
        found += _chosen(choose(None))
    except UsageError as error:
        found.append(fault("site", str(error), "See `qsgd-hpc sites list`."))
    for name in names():
        try:
            load(name)
        except UsageError as error:
            found.append(fault("profiles", str(error), "Correct that line of the file."))
    remedy = "Reinstall or remove that package."
    return found + [fault("profiles", text, remedy) for text in package_faults()]


def _chosen(here: Site) -> list[Finding]:
    command = SCHEDULERS[here.scheduler].command
    path = shutil.which(command) if command else None
    text = f"{here.name}: {here.description}" + (f"; {path}" if path else "")
    if here.generic:
        remedy = "Run `qsgd-hpc sites new NAME` to write a profile from the scheduler's answers."
        return [note("site", f"{text}: queues and GPUs are unknown", remedy)]
    if command and not path:
        remedy = f"Log in to {here.name}, or unset QSGD_SITE."
        return [fault("site", f"{text}; {command} is not on PATH", remedy)]
    found = [ok("site", text)]
    if marks := unconfirmed(merged(here.name)):
        words = ", ".join(map(dotted, marks))
        remedy = f"Run `qsgd-hpc sites check {here.name}` to compare it with the machine."
        found.append(note("site", f"not confirmed for {here.name}: {words}", remedy))
    if "account" in here.required and not (here.default_account or env.get("QSGD_ACCOUNT")):
        remedy = f"Set QSGD_ACCOUNT, or write defaults: {{account: PROJECT}} for {here.name}."
        found.append(note("site", "no account: submit needs --account", remedy))
    return found


ELSEWHERE = "Set QSGD_HOME to a folder on another file system."
LITTLE_BYTES = 100 << 20
TOO_LITTLE_BYTES = 1 << 20


def job_folder() -> list[Finding]:
    """Test the file operations of the job registry in $QSGD_HOME; remove all files afterwards."""
    folder = home()
    # Do not create the folder: only the first job does.
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        trial = Path(tempfile.mkdtemp(prefix=".qsgd-hpc-doctor-", dir=there))
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        return [fault("job folder", text, "Set QSGD_HOME to a writable folder.")]
    try:
        found = [_room(folder, there), *_renames(folder, trial), *_locks(folder, trial)]
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return found


def _room(folder: Path, there: Path) -> Finding:
    free_bytes = shutil.disk_usage(there).free
    free = f"{free_bytes >> 30} GB" if free_bytes >> 30 else f"{free_bytes >> 20} MB"
    text = f"{folder}, {free} free"
    remedy = "Free some space there, or set QSGD_HOME to another folder."
    if free_bytes < TOO_LITTLE_BYTES:
        return fault("job folder", text, remedy)
    return note("job folder", text, remedy) if free_bytes < LITTLE_BYTES else ok("job folder", text)


def _renames(folder: Path, trial: Path) -> list[Finding]:
    """Rename two folders to one name: the second must fail, or two jobs could get the same id."""
    for draft in ("a", "b"):
        (trial / draft).mkdir()
        (trial / draft / "request.json").write_text("{}")
    (trial / "a").rename(trial / "job-1")
    try:
        (trial / "b").rename(trial / "job-1")
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return []
        raise
    text = f"{folder} does not prevent a job's record from replacing another's"
    return [fault("job folder", text, ELSEWHERE)]


def _locks(folder: Path, trial: Path) -> list[Finding]:
    """Lock a file twice: the second must fail, or local jobs would run at the same time."""
    first, second = (os.open(trial / "lock", os.O_RDWR | os.O_CREAT, 0o600) for _ in "ab")
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        return [fault("job folder", f"locks in {folder} have no effect", ELSEWHERE)]
    except OSError as error:
        text = f"{folder} has no locks ({error.strerror}): local jobs cannot run in sequence"
        return [fault("job folder", text, ELSEWHERE)]
    finally:
        os.close(first)
        os.close(second)
