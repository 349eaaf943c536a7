"""Connect ranks over TCP, so that the core detects the death of a rank immediately.

Connections follow the tree over which the ranks negotiate, so that each rank has few; the core
forwards the news of a death over all of its connections.

The sockets carry no data unless a rank fails. They are closed in forked children (data loaders),
which would otherwise keep a dead rank's connection open.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from typing import Any

from qsgd_hpc._notices import warn
from qsgd_hpc.launch.hold_port import own_addresses
from qsgd_hpc.runtime.mpi_binding import holds_everywhere

__all__ = ["Greeter", "Peers", "connect", "forget"]

Peers = list[tuple[int, int, str]]  # file descriptor, rank, "host nid0001, pid 4242"

_open: list[int] = []  # file descriptors that a forked child must close

CONNECT_TIMEOUT_S = 20.0
PROGRESS_S = 0.01
TOKEN_BYTES = 16
MOST_WAITING = 128  # most connections that have not sent a complete greeting yet
_LOOPBACK = "127.0.0.1"
_GREETING = struct.Struct(f"!{TOKEN_BYTES}sI")


def connect(comm: Any, tree: Any) -> Peers:
    """Connect this rank to its parent and its children; collective over ``comm`` (mpi4py).

    If the hosts cannot reach each other over TCP, rank 0 prints a warning and every rank returns an
    empty list. Training works without these connections, but error messages then do not name a
    dead rank.

    Args:
        comm: the job.
        tree: this rank's _core.Tree.
    """
    if comm.Get_size() == 1:
        return []
    label = f"host {socket.gethostname()}, pid {os.getpid()}"
    # Children first: each parent waits until all of its children have called this.
    peers = _accept_children(comm, tree.children, label) if tree.children else []
    if tree.parent >= 0:
        peers += _reach_parent(comm, tree.parent, label)
    wanted = len(tree.children) + (tree.parent >= 0)
    if not holds_everywhere(comm, len(peers) == wanted):
        few = f"rank {comm.Get_rank()} has {len(peers)} of {wanted} TCP connections"
        fault = comm.allreduce("" if len(peers) == wanted else few, op=max)
        for fd, _, _ in peers:
            os.close(fd)
        if comm.Get_rank() == 0:
            warn(
                f"{fault}; a rank that dies cannot be named. QSGD_LIFELINE=0 suppresses this "
                "warning"
            )
        return []
    _open.extend(fd for fd, _, _ in peers)
    return peers


class Greeter:
    """The parent's side of the handshake: waits for all connections concurrently.

    Port scanners and health checks connect to every port. Those that are silent, slow or send
    something else delay no rank. A peer that greets correctly and then disconnects is detected
    later, by the core. A context manager: on exit, it closes all connections except those in
    `found`.

    Args:
        server: a listening socket.
        token: the secret of this job's ranks.
        ranks: the ranks to wait for.
    """

    def __init__(self, server: socket.socket, token: bytes, ranks: Collection[int]) -> None:
        self.found: dict[int, socket.socket] = {}
        self._server, self._token, self._ranks = server, token, ranks
        self._received: dict[socket.socket, bytearray] = {}  # oldest connection first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Greeter:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._received):
            self._remove(sock).close()
        self._selector.close()

    def complete(self) -> bool:
        """Return whether all have greeted."""
        return len(self.found) == len(self._ranks)

    def greet(self, patience_s: float) -> bool:
        """Wait up to patience_s, then read all ready sockets; return whether a rank greeted."""
        before = len(self.found)
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._received:  # not removed meanwhile, to make room
                self._receive(key.fileobj)
        return len(self.found) > before

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sock.setblocking(False)
            if len(self._received) >= MOST_WAITING:
                # A rank greets as soon as it is connected: the oldest is most likely no rank.
                self._remove(next(iter(self._received))).close()
            self._received[sock] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, sock: Any) -> None:
        received = self._received[sock]
        with contextlib.suppress(BlockingIOError):
            try:
                piece = sock.recv(_GREETING.size - len(received))
            except ConnectionError:
                piece = b""
            received += piece
            if piece and len(received) < _GREETING.size:
                return
            rank = self._answer(self._remove(sock), bytes(received))
            if rank is None:
                sock.close()  # not a rank of this job
            else:
                self.found[rank] = sock

    def _answer(self, sock: socket.socket, greeting: bytes) -> int | None:
        """Answer a greeting and return its rank; None if it is not from a rank of this job."""
        if len(greeting) < _GREETING.size:
            return None
        token, rank = _GREETING.unpack(greeting)
        if not hmac.compare_digest(token, self._token) or rank not in self._ranks:
            return None
        try:
            sock.sendall(self._token)  # fits the empty buffer of a new connection
        except OSError:
            return None
        return int(rank)

    def _remove(self, sock: socket.socket) -> socket.socket:
        self._selector.unregister(sock)
        del self._received[sock]
        return sock


def _accept_children(comm: Any, children: Collection[int], label: str) -> Peers:
    token = secrets.token_bytes(TOKEN_BYTES)
    with (
        socket.create_server(("", 0), backlog=len(children) + MOST_WAITING) as server,
        Greeter(server, token, children) as greeter,
    ):
        contact = (own_addresses(), server.getsockname()[1], token, label)
        requests = [comm.isend(contact, child) for child in children]
        last_greeting_s = time.monotonic()
        while not greeter.complete() and time.monotonic() < last_greeting_s + CONNECT_TIMEOUT_S:
            # Some MPIs make progress on a message only while its sender is inside MPI, and the
            # children wait for this one. Open MPI makes none if it finds what it is asked for, and
            # a child may have sent its label: ask for a message that nobody sends.
            comm.Iprobe(source=comm.Get_rank())
            if greeter.greet(PROGRESS_S):
                last_greeting_s = time.monotonic()
    labels = {child: comm.recv(source=child) for child in children}
    for request in requests:
        request.wait()
    return [(_detach(greeter.found[rank]), rank, labels[rank]) for rank in sorted(greeter.found)]


def _reach_parent(comm: Any, parent: int, label: str) -> Peers:
    request = comm.isend(label, parent)
    addresses, port, token, theirs = comm.recv(source=parent)
    peers = _greet(addresses, port, token, comm.Get_rank(), near=_host(theirs) == _host(label))
    request.wait()
    return [(fd, parent, theirs) for fd in peers]


def _greet(addresses: list[str], port: int, token: bytes, rank: int, *, near: bool) -> list[int]:
    """Return the connection to the parent as a list of one, or an empty list."""
    if near:
        addresses = [_LOOPBACK, *addresses]  # needs no name server, which may take seconds
    for address in dict.fromkeys(addresses):
        host: Any = os.fsencode(address)  # a str would load the IDNA codec, 4 ms on each rank
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S / 4)
        except OSError:
            continue
        # Two hosts may have the same name, and another program may listen at this port: only the
        # parent answers with the token. The parent waits longer than this socket's timeout.
        with contextlib.suppress(OSError):
            sock.sendall(_GREETING.pack(token, rank))
            if sock.recv(TOKEN_BYTES, socket.MSG_WAITALL) == token:
                return [_detach(sock)]
        sock.close()
    return []


def _host(label: str) -> str:
    return label.partition(",")[0]


def _detach(sock: socket.socket) -> int:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that loses power does not close its connections: probe after 5 s without traffic, and
    # fail after 15 s more.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock.detach()


def forget(peers: Peers | None = None) -> None:
    """Drop sockets that the core has closed (default: all), as their numbers may be reused."""
    gone = set(_open if peers is None else (fd for fd, _, _ in peers))
    _open[:] = [fd for fd in _open if fd not in gone]


def _close_open() -> None:
    """In a forked child: close the inherited sockets."""
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_open)
