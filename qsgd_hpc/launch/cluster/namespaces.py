"""System calls for namespaces: create them, enter them, and pass capabilities inside them.

They call the C library, because Python has os.unshare and os.setns only from 3.12 on.

As a program, this replaces ssh for mpiexec: ``enter.sh [ssh options] HOST COMMAND...`` starts it by
its path to run a command on one of the hosts, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "VARIABLE",
    "Namespaces",
    "become_private",
    "explain_namespaces",
    "hide_file",
    "main",
    "new_host",
    "within_network",
    "written",
]

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWNET = 0x10000000, 0x40000000
OWN = NEWNS | NEWUTS | NEWIPC | NEWNET
KINDS = {"net": NEWNET, "uts": NEWUTS, "ipc": NEWIPC, "mnt": NEWNS}

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_DUMPABLE, _PR_CAP_AMBIENT = 4, 47
_AMBIENT_RAISE, _AMBIENT_CLEAR = 2, 4
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@dataclass(frozen=True)
class Namespaces:
    """Open descriptors of one set of namespaces, which keep it alive, by kind."""

    descriptors: Mapping[str, int]

    @classmethod
    def here(cls) -> Namespaces:
        """Open the namespaces of this process."""
        return cls({kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS})

    def enter(self, kinds: Iterable[str] = tuple(KINDS)) -> None:
        """Move this process to these namespaces; the working directory stays the same."""
        folder = Path.cwd()
        for kind in kinds:
            _call("setns", self.descriptors[kind], KINDS[kind])
        if "mnt" in kinds:
            os.chdir(folder)


@contextlib.contextmanager
def within_network(place: Namespaces, home: Namespaces) -> Iterator[None]:
    """Execute the block in the network of ``place``, then return to ``home``."""
    place.enter(["net"])
    try:
        yield
    finally:
        home.enter(["net"])


def become_private() -> None:
    """Move this process to new namespaces.

    Root does so directly. Other users, and root without the capability (in a container), first
    enter a user namespace with the same user id, where they have all capabilities; programs that
    this process starts inherit them.

    Raises:
        OSError: this system does not permit it; see explain_namespaces.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            _call("unshare", OWN)
            _keep_mounts_private()
            return
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEWUSER | OWN)
    Path("/proc/self/setgroups").write_text("deny")  # required by the kernel before the next line
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that hosts can be entered through /proc
    _make_rights_inheritable()
    _keep_mounts_private()


def _keep_mounts_private() -> None:
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _make_rights_inheritable() -> None:
    """Make programs that this process starts inherit its capabilities in the user namespace.

    Otherwise, a program started by a user other than root has none.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high
    _call("capget", header, data)
    data[2], data[5] = data[1], data[4]
    _call("capset", header, data)
    for capability in range(64):
        if data[1 + 3 * (capability // 32)] >> capability % 32 & 1:
            _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_RAISE, capability, 0, 0)


def new_host(name: str) -> None:
    """Move this process to a new host, with separate network, hostname and shared memory."""
    _call("unshare", OWN)
    socket.sethostname(name)
    if Path("/dev/shm").is_dir():
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


def hide_file(path: Path, by: Path) -> None:
    """Mount the file ``by`` over ``path``, in this process's mount namespace."""
    _call("mount", os.fsencode(by), os.fsencode(path), None, _MS_BIND, None)


def explain_namespaces(error: OSError) -> str:
    """Return why this user cannot create namespaces, and what an administrator can do."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"--network: {error.strerror}; each host needs four open files: use ulimit -n "
            "4096, or fewer hosts"
        )
    why = f"--network needs namespaces, which this system denies you ({error.strerror})"
    if error.errno == errno.ENOSPC or _value("user/max_user_namespaces") == "0":
        return f"{why}; root: sysctl user.max_user_namespaces=10000"
    if _value("kernel/unprivileged_userns_clone") == "0":
        return f"{why}; root: sysctl kernel.unprivileged_userns_clone=1"
    if _value("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return f"{why}; root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return (
        f"{why}; a container needs --cap-add SYS_ADMIN --cap-add NET_ADMIN (Docker, Podman), or "
        "run on the machine itself"
    )


def _value(name: str) -> str | None:
    try:
        return (Path("/proc/sys", name)).read_text().strip()
    except OSError:
        return None


VARIABLE = "QSGD_CLUSTER"  # the pid of the keeper, and for each host its descriptors there
_WITH_VALUE = {"-l", "-p", "-o", "-i", "-F"}


def written(keeper: int, hosts: dict[str, dict[str, int]]) -> str:
    """Return the value of QSGD_CLUSTER.

    >>> written(42, {"node1": {"net": 5, "uts": 6}})
    '42 node1:net=5,uts=6'
    """
    parts = [f"{h}:{','.join(f'{k}={fd}' for k, fd in fds.items())}" for h, fds in hosts.items()]
    return " ".join([str(keeper), *parts])


def _read(text: str, host: str) -> dict[str, str] | None:
    """Return the paths of a host's namespaces by kind; None: there is no such host."""
    keeper, *parts = text.split()
    for part in parts:
        name, _, descriptors = part.partition(":")
        if name == host:
            pairs = (pair.split("=") for pair in descriptors.split(","))
            return {kind: f"/proc/{keeper}/fd/{number}" for kind, number in pairs}
    return None


def main(words: list[str]) -> None:
    """Enter the host and execute the command in place of this process. Never returns."""
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in _WITH_VALUE else 1 :]
    host, command = (words[0], words[1:]) if words else ("", [])
    paths = _read(os.environ.get(VARIABLE, "0"), host)
    if paths is None:
        sys.exit(f"qsgd-hpc run: {host!r} is not a host of this cluster")
    try:
        Namespaces({k: os.open(p, os.O_RDONLY) for k, p in paths.items()}).enter()
        # Drop inheritable capabilities, so that the shell has only the user's own.
        _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    except OSError as error:
        sys.exit(f"qsgd-hpc run: cannot enter host {host}: {error}")
    # Like ssh, pass the command to a shell as one line.
    os.execv("/bin/sh", ["/bin/sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main(sys.argv[1:])
