"""The bridge, the hosts' links to it, and their rate and latency, set by ``ip`` and ``tc``."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from qsgd_hpc.launch.cluster.namespaces import Namespaces, new_host
from qsgd_hpc.launch.cluster.network import LAUNCHER, SUBNET, Network, address, host_names
from qsgd_hpc.launch.cluster.obstacles import ClusterError, explain_tool

__all__ = ["add_hosts", "drained_bytes", "sent_bytes", "tool"]

BRIDGE = "bridge0"
MASK = SUBNET.rpartition("/")[2]
# Size of an unshaped burst: a timer that fires late on busy cores must not cost bandwidth. An
# unsegmented packet (64 KB and headers) must fit, or the CPU would have to segment it.
BURST_S, LEAST_BURST_BYTES = 0.002, 80 << 10
# Packets that would wait longer are dropped. On slow links, the queue is at least as large as a
# switch's buffer: otherwise, every new connection would lose packets and wait for them.
QUEUE_S, LEAST_QUEUE_BYTES = 0.05, 512 << 10
FRAME_BYTES = 1514
# A user's PATH often lacks the folders of the administrator's tools.
TOOL_FOLDERS = ("/usr/sbin", "/sbin")


def tool(name: str) -> str | None:
    """Return the path of ``ip`` or ``tc``; None: it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOL_FOLDERS])
    return shutil.which(name, path=path)


def _batch(name: str, lines: Sequence[str], descriptors: Sequence[int] = ()) -> None:
    path = tool(name)
    if path is None:
        raise ClusterError(explain_tool(name))
    done = subprocess.run(
        [path, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        pass_fds=descriptors,
    )
    if done.returncode != 0:
        message = " ".join(done.stderr.partition("Command failed")[0].split())
        raise ClusterError(explain_tool(name, "\n".join(lines), message))


def add_hosts(network: Network, count: int, home: Namespaces) -> dict[str, Namespaces]:
    """Create the hosts, join them by a bridge in this process's network ``home``; return them.

    Raises:
        ClusterError: a tool or a part of the kernel is missing.
    """
    names = host_names(count)
    _batch(
        "ip",
        [
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"link set {BRIDGE} up",
            f"addr add {LAUNCHER}/{MASK} dev {BRIDGE}",
        ],
    )
    hosts = {}
    for number, name in enumerate(names, 1):
        new_host(name)
        _add_link(network, number, name, home)
        hosts[name] = Namespaces.here()
        home.enter()
    _batch("ip", [f"link set {name} master {BRIDGE} up" for name in names])
    if network.latency_us:
        _delay(network, names)
    return hosts


def _add_link(network: Network, number: int, name: str, home: Namespaces) -> None:
    """Create the network interface of this process's host, and shape its outgoing traffic."""
    home_net = home.descriptors["net"]
    _batch(
        "ip",
        [
            "link set lo up",
            f"link add eth0 type veth peer name {name} netns /proc/self/fd/{home_net}",
        ],
        [home_net],
    )
    # One address per host: neighbour discovery of IPv6 would only add to the bytes counted.
    _set("ipv6/conf/eth0/disable_ipv6", "1")
    # bbr, the default of some machines, is slower and burstier on links of such low latency.
    _set("ipv4/tcp_congestion_control", "reno")
    _batch(
        "ip",
        [
            "link set eth0 up",
            f"addr add {address(number)}/{MASK} dev eth0",
            # Programs determine their own address from the interface of the default route.
            f"route add default via {LAUNCHER}",
        ],
    )
    burst = max(LEAST_BURST_BYTES, int(network.rate_bits_s / 8 * BURST_S))
    queue = burst + max(LEAST_QUEUE_BYTES, int(network.rate_bits_s / 8 * QUEUE_S))
    shape = f"rate {network.rate_bits_s}bit burst {burst} limit {queue}"
    _batch("tc", [f"qdisc add dev eth0 root tbf {shape}"])


def _delay(network: Network, names: Sequence[str]) -> None:
    """Delay the packets to each host; the limit fits the queue and all packets in flight."""
    in_flight_s = network.latency_us * 1e-6 + QUEUE_S
    packets = 1000 + int(network.rate_bits_s / 8 * in_flight_s * len(names) / FRAME_BYTES)
    delay = f"delay {network.latency_us:g}us limit {packets}"
    _batch("tc", [f"qdisc add dev {name} root netem {delay}" for name in names])


def _set(name: str, value: str) -> None:
    path = Path("/proc/sys/net") / name
    if path.exists():
        path.write_text(value)


def sent_bytes(names: Sequence[str]) -> list[int]:
    """Return the bytes that each host has sent, including headers, counted at the bridge."""
    counted = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        counted[name.strip()] = int(numbers.split()[0])
    return [counted[name] for name in names]


def drained_bytes(names: Sequence[str]) -> list[int]:
    """Wait until no more bytes arrive, for 5 s at most; return ``sent_bytes``."""
    counted, until_s = sent_bytes(names), time.monotonic() + 5
    while time.monotonic() < until_s:
        time.sleep(0.05)
        before, counted = counted, sent_bytes(names)
        if counted == before:
            break
    return counted
