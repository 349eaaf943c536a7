"""Reasons why this machine cannot emulate a cluster, and their remedies."""

from __future__ import annotations

import errno
from pathlib import Path

from qsgd_hpc.errors import UsageError

__all__ = ["ClusterError", "explain_namespaces", "explain_tool"]

_SYS = Path("/proc/sys")
PACKAGE = "iproute2 (on Fedora and its kin: iproute and iproute-tc)"
# (text in the commands, the kernel module needed, the remedy if it is missing).
_MODULES = (
    (" tbf ", "sch_tbf", "root: modprobe sch_tbf"),
    (" netem ", "sch_netem", "root: modprobe sch_netem, or leave out latency="),
    ("type bridge", "bridge", "root: modprobe bridge"),
    ("type veth", "veth", "root: modprobe veth"),
)


class ClusterError(UsageError):
    """The hosts cannot be created here; the message has the remedy, after its last semicolon."""


def explain_tool(name: str, steps: str = "", message: str | None = None) -> str:
    """Return why commands of ``ip`` or ``tc`` failed; message None: it is not installed."""
    if message is None:
        return f"--network needs the program {name}, which is not on PATH; install {PACKAGE}"
    if "unknown" in message.lower():
        for words, module, remedy in _MODULES:
            if words in steps:
                return (
                    f"--network needs {module}, which this kernel lacks ({name}: {message}); "
                    f"{remedy}"
                )
    return f"--network: {name} could not build the network: {message}"


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
        return (_SYS / name).read_text().strip()
    except OSError:
        return None
