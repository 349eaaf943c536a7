"""Names and addresses of the hosts, and the number of hosts for a number of ranks; pure."""

from __future__ import annotations

__all__ = [
    "LAUNCHER",
    "MOST_HOSTS",
    "SUBNET",
    "address",
    "host_names",
    "hosts_file",
    "hosts_needed",
]

# Private to each cluster, so concurrent clusters can use the same addresses.
_PREFIX = "10.77.0"
SUBNET = f"{_PREFIX}.0/24"
MOST_HOSTS = 253
LAUNCHER = f"{_PREFIX}.254"
"""Address of the machine's side of the bridge, where mpiexec runs."""


def hosts_needed(ranks: int, ranks_per_node: int) -> int:
    """Return the number of hosts for a number of ranks."""
    return -(-ranks // ranks_per_node)


def host_names(count: int) -> list[str]:
    """Return the names of the hosts: node1, node2, ..."""
    return [f"node{number}" for number in range(1, count + 1)]


def address(number: int) -> str:
    """Return the address of a host by its number, from 1."""
    return f"{_PREFIX}.{number}"


def hosts_file(count: int, launcher_name: str) -> str:
    """Return the content of /etc/hosts in the cluster, which has no name server."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{LAUNCHER} {launcher_name}"]
    lines += [f"{address(i)} {name}" for i, name in enumerate(host_names(count), 1)]
    return "\n".join(lines) + "\n"
