"""Connects every rank to rank 0 over TCP, so that the core can tell at once that a rank died.

The sockets carry nothing while all is well. They are closed in forked children (data loaders),
which would otherwise keep a dead rank's connection open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import warnings
from typing import Any

__all__ = ["Peers", "connect", "forget"]

Peers = list[tuple[int, int, str]]  # file descriptor, rank, "host nid0001, pid 4242"

_open: list[int] = []  # what a forked child must close

CONNECT_TIMEOUT_S = 20.0
TOKEN_BYTES = 16
_GREETING = struct.Struct(f"!{TOKEN_BYTES}sI")


def connect(comm: Any) -> Peers:
    """Build the star around rank 0; collective over ``comm`` (mpi4py).

    Returns an empty list on every rank, with a warning on rank 0, when the hosts cannot reach each
    other over TCP: training works without, only a dead rank is then not named.
    """
    if comm.Get_size() == 1:
        return []
    labels = comm.allgather(f"host {socket.gethostname()}, pid {os.getpid()}")
    peers = _accept_all(comm, labels) if comm.Get_rank() == 0 else _reach_root(comm, labels)
    faults = [fault for fault in comm.allgather(_fault(comm, peers)) if fault]
    if faults:
        for fd, _, _ in peers:
            os.close(fd)
        if comm.Get_rank() == 0:
            warnings.warn(
                f"qsgd-hpc: {faults[0]}; a rank that dies will not be named. QSGD_LIFELINE=0 "
                "silences this.",
                stacklevel=2,
            )
        return []
    _open.extend(fd for fd, _, _ in peers)
    return peers


def _fault(comm: Any, peers: Peers) -> str:
    wanted = comm.Get_size() - 1 if comm.Get_rank() == 0 else 1
    if len(peers) == wanted:
        return ""
    return f"rank {comm.Get_rank()} has {len(peers)} of {wanted} TCP connections"


def _accept_all(comm: Any, labels: list[str]) -> Peers:
    token = secrets.token_bytes(TOKEN_BYTES)
    peers: Peers = []
    with socket.create_server(("", 0), backlog=comm.Get_size()) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        comm.bcast((_own_addresses(), server.getsockname()[1], token))
        with contextlib.suppress(OSError):
            while len(peers) < comm.Get_size() - 1:
                sock, _ = server.accept()
                sock.settimeout(CONNECT_TIMEOUT_S)
                greeting = sock.recv(_GREETING.size, socket.MSG_WAITALL)
                if len(greeting) < _GREETING.size or greeting[:TOKEN_BYTES] != token:
                    sock.close()  # a stranger found the port
                    continue
                rank = _GREETING.unpack(greeting)[1]
                peers.append((_detach(sock), rank, labels[rank]))
    return sorted(peers, key=lambda peer: peer[1])


def _reach_root(comm: Any, labels: list[str]) -> Peers:
    addresses, port, token = comm.bcast(None)
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S / 4)
            sock.sendall(_GREETING.pack(token, comm.Get_rank()))
        except OSError:
            continue
        return [(_detach(sock), 0, labels[0])]
    return []


def _own_addresses() -> list[str]:
    """Names and addresses under which the other hosts may reach this one, the likeliest first."""
    host = socket.gethostname()
    found = [host]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]
    # The address of the interface with the default route; nothing is sent by connecting UDP.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]


def _detach(sock: socket.socket) -> int:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that loses power sends no farewell: probe after 5 s of silence, give up after 15 more.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock.detach()


def forget() -> None:
    """Note that the core has closed the sockets: their numbers may belong to others now."""
    _open.clear()


def _close_open() -> None:
    """In a forked child: give up the inherited sockets, once."""
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_open)
