"""System calls for namespaces: make them, enter them, and the rights of a user inside them.

Python has os.unshare and os.setns from 3.12 on; before that the C library has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Namespaces", "become_private", "drop_rights", "hide_file", "new_host", "within_network"]

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
        """Open those of this process."""
        return cls({kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in KINDS})

    def enter(self, kinds: Iterable[str] = tuple(KINDS)) -> None:
        """Move this process there; with "mnt", to the same working directory."""
        folder = Path.cwd()
        for kind in kinds:
            _call("setns", self.descriptors[kind], KINDS[kind])
        if "mnt" in kinds:
            os.chdir(folder)


@contextlib.contextmanager
def within_network(place: Namespaces, home: Namespaces) -> Iterator[None]:
    """Do something in the network of another place, and come home."""
    place.enter(["net"])
    try:
        yield
    finally:
        home.enter(["net"])


def become_private() -> None:
    """Give this process namespaces of its own.

    Root does it directly. Anybody else, and root without the right to (in a container), first
    becomes a user of the same number in a user namespace, with every right inside it that the
    programs it starts inherit.

    Raises:
        OSError: this system does not let the user; obstacles.py explains.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            _call("unshare", OWN)
            _keep_mounts_private()
            return
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEWUSER | OWN)
    Path("/proc/self/setgroups").write_text("deny")  # or the kernel refuses the next line
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that hosts can be entered by way of /proc
    _pass_rights_on()
    _keep_mounts_private()


def _keep_mounts_private() -> None:
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _pass_rights_on() -> None:
    """Let programs that this process starts have its rights in the user namespace.

    Without that a program started by anyone but root has none.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high
    _call("capget", header, data)
    data[2], data[5] = data[1], data[4]
    _call("capset", header, data)
    for capability in range(64):
        if data[1 + 3 * (capability // 32)] >> capability % 32 & 1:
            _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_RAISE, capability, 0, 0)


def drop_rights() -> None:
    """Let the next program that this process becomes be an ordinary one of the user's."""
    _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)


def new_host(name: str) -> None:
    """Move this process to a new host: network, hostname and shared memory of its own."""
    _call("unshare", OWN)
    socket.sethostname(name)
    if Path("/dev/shm").is_dir():
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


def hide_file(path: Path, by: Path) -> None:
    """Let the content of one file stand in the place of another, in this process's mounts."""
    _call("mount", os.fsencode(by), os.fsencode(path), None, _MS_BIND, None)
