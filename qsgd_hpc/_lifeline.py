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
import sys
import time
from typing import Any

__all__ = ["Peers", "connect", "forget", "own_addresses"]

Peers = list[tuple[int, int, str]]  # file descriptor, rank, "host nid0001, pid 4242"

_open: list[int] = []  # what a forked child must close

CONNECT_TIMEOUT_S = 20.0
PROGRESS_S = 0.01
TOKEN_BYTES = 16
_LOOPBACK = "127.0.0.1"
_GREETING = struct.Struct(f"!{TOKEN_BYTES}sI")


def connect(comm: Any) -> Peers:
    """Build the star around rank 0; collective over ``comm`` (mpi4py).

    Returns an empty list on every rank, after a warning of rank 0, when the hosts cannot reach each
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
            # Not a Python warning: made an error, it would leave the other ranks waiting.
            text = f"{faults[0]}; a rank that dies will not be named. QSGD_LIFELINE=0 silences this"
            print(f"qsgd-hpc: warning: {text}", file=sys.stderr, flush=True)
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
    found: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=comm.Get_size()) as server:
        server.settimeout(PROGRESS_S)
        comm.bcast((own_addresses(), server.getsockname()[1], token))
        heard_s = time.monotonic()
        while len(found) < comm.Get_size() - 1 and time.monotonic() < heard_s + CONNECT_TIMEOUT_S:
            # Some networks move a message only while its sender is inside MPI, and the others wait
            # for this one.
            comm.Iprobe()
            with contextlib.suppress(OSError):
                sock, _ = server.accept()
                heard_s = time.monotonic()
                rank = _greeted(sock, token)
                if rank is None:
                    sock.close()  # a stranger found the port
                else:
                    found[rank] = sock
    return [(_detach(found[rank]), rank, labels[rank]) for rank in sorted(found)]


def _greeted(sock: socket.socket, token: bytes) -> int | None:
    """Exchange greetings; return the rank at the other end, if it is one."""
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        greeting = sock.recv(_GREETING.size, socket.MSG_WAITALL)
        if len(greeting) < _GREETING.size or greeting[:TOKEN_BYTES] != token:
            return None
        sock.sendall(token)
    except OSError:
        return None
    rank: int = _GREETING.unpack(greeting)[1]
    return rank


def _reach_root(comm: Any, labels: list[str]) -> Peers:
    addresses, port, token = comm.bcast(None)
    if _host(labels[0]) == _host(labels[comm.Get_rank()]):
        addresses = [_LOOPBACK, *addresses]  # asks no name server, which may take seconds
    for address in dict.fromkeys(addresses):
        try:
            sock = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S / 4)
        except OSError:
            continue
        # Hosts may bear one name, and others may listen at the same port: only the root answers so.
        sock.settimeout(CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            sock.sendall(_GREETING.pack(token, comm.Get_rank()))
            if sock.recv(TOKEN_BYTES, socket.MSG_WAITALL) == token:
                return [(_detach(sock), 0, labels[0])]
        sock.close()
    return []


def _host(label: str) -> str:
    return label.partition(",")[0]


def own_addresses() -> list[str]:
    """Names and addresses under which the other hosts may reach this one, the likeliest first."""
    host = socket.gethostname()
    found = [host]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]
    # The address of the interface with the default route; nothing is sent by connecting UDP.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), _LOOPBACK]


def _detach(sock: socket.socket) -> int:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that loses power sends no farewell: probe after 5 s of silence, give up after 15 more.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock.detach()


def forget(peers: Peers | None = None) -> None:
    """Note that the core has closed these sockets, or all: their numbers may belong to others."""
    gone = set(_open if peers is None else (fd for fd, _, _ in peers))
    _open[:] = [fd for fd in _open if fd not in gone]


def _close_open() -> None:
    """In a forked child: give up the inherited sockets, once."""
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_open)
