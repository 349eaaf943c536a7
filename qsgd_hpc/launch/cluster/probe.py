"""Measure the links' rate: for a short time, all hosts concurrently send to the next one by TCP.

Collectives load the network in the same way, so this also detects cores that are too busy to serve
all links at their rate.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qsgd_hpc.launch.cluster.namespaces import Namespaces, within_network
from qsgd_hpc.launch.cluster.network import Network, address
from qsgd_hpc.launch.cluster.obstacles import ClusterError

__all__ = ["reached_bits_s"]

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
