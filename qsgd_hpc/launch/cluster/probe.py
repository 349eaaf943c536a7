"""Measures the links' rate: all hosts send to the next one by TCP at once, for a moment.

That is what a collective does to the network, so that cores which are too busy to carry all links
at their rate show here.
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

from qsgd_hpc.launch.cluster.hosts import address
from qsgd_hpc.launch.cluster.namespaces import Namespaces, within_network
from qsgd_hpc.launch.cluster.network import Network
from qsgd_hpc.launch.cluster.obstacles import ClusterError

__all__ = ["reached_bits_s"]

CONNECT_S = 20.0
BEFORE_S, LEAST_S, MOST_S = 0.1, 0.4, 4.0
# A slow link is watched until so much could have passed, or its bursts would hide its rate.
ENOUGH_BYTES = 2 << 20
PIECE_BYTES = 1 << 18


def reached_bits_s(network: Network, hosts: Sequence[Namespaces], home: Namespaces) -> list[float]:
    """Return the payload that each host has received per second, in bits; of one host nothing.

    Takes half a second, or up to 4 on a link below 40 Mb/s.

    Raises:
        ClusterError: a host cannot be reached.
    """
    if len(hosts) < 2:
        return []
    listeners = [_listener(host, home) for host in hosts]
    time_s = min(MOST_S, max(LEAST_S, 8 * ENOUGH_BYTES / network.rate_bits_s))
    stay, leave = os.pipe()  # its closing tells the processes that all have answered
    probes = []
    for i, (host, listener) in enumerate(zip(hosts, listeners, strict=True)):
        next_host = (i + 1) % len(hosts)
        peer = (address(next_host + 1), listeners[next_host].getsockname()[1])
        measure = partial(_exchange, listener, peer, time_s)
        probes.append(_fork(host, measure, stay, leave))
    for listener in listeners:
        listener.close()
    try:
        return [_read(answer, i) for i, (_, answer) in enumerate(probes, 1)]
    finally:
        os.close(leave)
        os.close(stay)
        for pid, _ in probes:
            os.waitpid(pid, 0)


def _listener(host: Namespaces, home: Namespaces) -> socket.socket:
    with within_network(host, home):
        listener = socket.socket()
    listener.bind(("", 0))  # what a rank has left behind may hold any port
    listener.listen(1)
    return listener


def _fork(
    host: Namespaces, measure: Callable[[], tuple[Any, ...]], stay: int, leave: int
) -> tuple[int, int]:
    """Start the process that measures for a host; return it and where its answer can be read."""
    answer, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        return pid, answer
    os.close(leave)
    try:
        host.enter(["net"])
        rate, *_connections = measure()
        os.write(told, str(rate).encode())
    except BaseException as error:
        os.write(told, str(error).encode() or b"?")
    os.close(told)
    os.read(stay, 1)  # an earlier end would reset connections that others still measure
    os._exit(0)


def _exchange(
    listener: socket.socket, peer: tuple[str, int], time_s: float
) -> tuple[float, socket.socket, socket.socket]:
    """Send to the next host, receive from the one before; return the bits received per second.

    With the two connections, which must stay open for the others.
    """
    out = socket.create_connection(peer, timeout=CONNECT_S)
    listener.settimeout(CONNECT_S)
    into, _ = listener.accept()
    # What is still on its way at the end must not disturb the run: a reset, not a farewell.
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
