"""Run a command on one of the hosts: ``enter.sh [ssh options] HOST COMMAND...``, as ssh would.

mpiexec starts enter.sh, which starts this file by its path, so it uses the standard library only.
QSGD_CLUSTER contains the pid of the keeper, and for each host the keeper's file descriptors of its
namespaces.
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["VARIABLE", "main", "written"]

VARIABLE = "QSGD_CLUSTER"
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
    system = runpy.run_path(os.path.join(os.path.dirname(__file__), "namespaces.py"))  # noqa: PTH118, PTH120
    try:
        place = system["Namespaces"]({k: os.open(p, os.O_RDONLY) for k, p in paths.items()})
        place.enter()
        system["drop_rights"]()
    except OSError as error:
        sys.exit(f"qsgd-hpc run: cannot enter host {host}: {error}")
    # Like ssh, pass the command to a shell as one line.
    os.execv("/bin/sh", ["/bin/sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main(sys.argv[1:])
