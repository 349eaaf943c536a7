"""The bridge and the hosts' links to it: built and shaped by ``ip`` and ``tc``, measured, reported.

To measure the rate, all hosts concurrently send to the next one by TCP for a short time.
Collectives load the network in the same way, so this also detects cores that are too busy to serve
all links at their rate.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster.namespaces import Namespaces, new_host, within_network
from qsgd_hpc.launch.cluster.network import (
    LAUNCHER,
    SHORT,
    SUBNET,
    Network,
    address,
    bits_per_s,
    host_names,
)

__all__ = [
    "ClusterError",
    "LinkLog",
    "add_hosts",
    "drained_bytes",
    "explain_tool",
    "reached_bits_s",
    "sent_bytes",
    "tool",
]

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


CONNECT_S = 20.0
BEFORE_S, LEAST_S, MOST_S = 0.1, 0.4, 4.0
# A slow link is measured for the time of this many bytes, or bursts would dominate its rate.
ENOUGH_BYTES = 2 << 20
PIECE_BYTES = 1 << 18


def reached_bits_s(network: Network, hosts: Sequence[Namespaces], home: Namespaces) -> list[float]:
    """Return the payload that each host receives, in bits per second; empty for a single host.

    Takes half a second, or up to 4 on a link below 40 Mb/s.

    Raises:
        ClusterError: a host cannot be reached.
    """
    if len(hosts) < 2:
        return []
    listeners = [_listener(host, home) for host in hosts]
    time_s = min(MOST_S, max(LEAST_S, 8 * ENOUGH_BYTES / network.rate_bits_s))
    done, done_in = os.pipe()  # closed when all processes have answered, so that they end
    probes = []
    for i, (host, listener) in enumerate(zip(hosts, listeners, strict=True)):
        next_host = (i + 1) % len(hosts)
        peer = (address(next_host + 1), listeners[next_host].getsockname()[1])
        measure = partial(_exchange, listener, peer, time_s)
        probes.append(_fork(host, measure, done, done_in))
    for listener in listeners:
        listener.close()
    try:
        return [_read(answer, i) for i, (_, answer) in enumerate(probes, 1)]
    finally:
        os.close(done_in)
        os.close(done)
        for pid, _ in probes:
            os.waitpid(pid, 0)


def _listener(host: Namespaces, home: Namespaces) -> socket.socket:
    with within_network(host, home):
        listener = socket.socket()
    listener.bind(("", 0))  # no fixed port: processes left over from a rank may use any
    listener.listen(1)
    return listener


def _fork(
    host: Namespaces, measure: Callable[[], tuple[Any, ...]], done: int, done_in: int
) -> tuple[int, int]:
    """Fork a process that measures on a host; return its pid and the read end of its answer."""
    answer, answer_in = os.pipe()
    pid = os.fork()
    if pid:
        os.close(answer_in)
        return pid, answer
    os.close(done_in)
    try:
        host.enter(["net"])
        rate, *_connections = measure()
        os.write(answer_in, str(rate).encode())
    except BaseException as error:
        os.write(answer_in, str(error).encode() or b"?")
    os.close(answer_in)
    os.read(done, 1)  # ending earlier would reset connections that others still measure
    os._exit(0)


def _exchange(
    listener: socket.socket, peer: tuple[str, int], time_s: float
) -> tuple[float, socket.socket, socket.socket]:
    """Send to the next host and receive from the previous one; return the received bits/s.

    Also returns the two connections, which must stay open for the other hosts.
    """
    out = socket.create_connection(peer, timeout=CONNECT_S)
    listener.settimeout(CONNECT_S)
    into, _ = listener.accept()
    # Data in flight at the end must not disturb the run: close resets the connection.
    out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    out.setblocking(False)
    data, buffer = bytes(PIECE_BYTES), bytearray(PIECE_BYTES)
    from_s = time.monotonic() + BEFORE_S
    to_s, received = from_s + time_s, 0
    while (now_s := time.monotonic()) < to_s:
        readable, writable, _ = select.select([into], [out], [], to_s - now_s)
        if writable:
            out.send(data)
        if readable:
            count = into.recv_into(buffer)
            received += count if now_s >= from_s else 0
    return 8 * received / (time.monotonic() - from_s), out, into


def _read(answer: int, number: int) -> float:
    with os.fdopen(answer) as pipe:
        text = pipe.read()
    try:
        return float(text)
    except ValueError:
        raise ClusterError(
            f"--network: node{number} cannot be reached over the network just built: {text}"
        ) from None


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


class LinkLog:
    """The measurements of the hosts' keeper before and after a run.

    Args:
        network: the requested network.
        hosts: number of hosts.
    """

    def __init__(self, network: Network, hosts: int) -> None:
        self.network, self.hosts = network, hosts
        self.before: list[int] = []

    def report(self, facts: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
        """Return messages about a measurement; after the run, also append the record.

        Args:
            facts: "when" ("before", "after"), "reached_bits_s" of each host's link, and after the
                run "sent_bytes" of each host.
            environ: the ranks' environment; QSGD_RECORDS is the file of the record.
        """
        reached = facts["reached_bits_s"]
        if facts["when"] == "before":
            self.before = reached
            return [self._opening(), *self._shortfall(reached, "")]
        sentences = [
            *self._closing(facts["sent_bytes"]),
            *self._shortfall(reached, " after the run"),
        ]
        if "why" in facts:
            sentences.append(f"warning: the links could not be probed again: {facts['why']}")
        return sentences + self._record(facts, environ)

    def _opening(self) -> str:
        name = f"network {self.network.label} (emulated)"
        if self.hosts == 1:
            return f"{name}: one host, so there is no communication"
        names, cores = host_names(self.hosts), len(os.sched_getaffinity(0))
        return (
            f"{name}: {names[0]} to {names[-1]} share the {cores} core{'s' if cores > 1 else ''} "
            f"of this machine; the links reach {bits_per_s(min(self.before))}"
        )

    def _closing(self, sent_bytes: list[int]) -> list[str]:
        if self.hosts == 1:
            return []
        most, name = max(zip(sent_bytes, host_names(self.hosts), strict=True))
        return [f"network: {most / 1e6:,.3g} MB sent by {name}, the most of any host"]

    def _shortfall(self, reached: list[int], when: str) -> list[str]:
        if not reached or not self.network.falls_short(min(reached)):
            return []
        return [
            f"warning: the links reach {bits_per_s(min(reached))}{when}, less than {SHORT:.0%} "
            f"of the {bits_per_s(self.network.rate_bits_s)} requested: this machine's cores "
            "cannot process more, or are busy; the results apply to the slower network"
        ]

    def _record(self, facts: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
        target = environ.get("QSGD_RECORDS")
        if not target:
            return []
        body = {
            "event": "network",
            "network": self.network.text,
            "rate_bits_s": self.network.rate_bits_s,
            "latency_us": self.network.latency_us,
            "hosts": self.hosts,
            "reached_before_bits_s": self.before,
            "reached_after_bits_s": facts["reached_bits_s"],
            "sent_bytes": facts["sent_bytes"],
        }
        try:
            with open(target, "a", encoding="utf-8") as file:  # noqa: PTH123 (one write, at its end)
                file.write(json.dumps(body) + "\n")
        except OSError as error:
            return [f"warning: QSGD_RECORDS={target}: {error.strerror}; the links are not recorded"]
        return []
