"""Connects ranks over TCP, so that the core can tell at once that a rank died.

Connections follow the tree in which the ranks agree, so that none has many; the core hands on what
it learns to all of its own.

The sockets carry nothing while all is well. They are closed in forked children (data loaders),
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
import sys
import time
from collections.abc import Collection
from typing import Any

from qsgd_hpc.launch.meeting import own_addresses
from qsgd_hpc.runtime.mpi_binding import holds_everywhere

__all__ = ["Greeter", "Peers", "connect", "forget"]

Peers = list[tuple[int, int, str]]  # file descriptor, rank, "host nid0001, pid 4242"

_open: list[int] = []  # what a forked child must close

CONNECT_TIMEOUT_S = 20.0
PROGRESS_S = 0.01
TOKEN_BYTES = 16
MOST_WAITING = 128  # connections that have not greeted yet
_LOOPBACK = "127.0.0.1"
_GREETING = struct.Struct(f"!{TOKEN_BYTES}sI")


def connect(comm: Any, tree: Any) -> Peers:
    """Connect this rank to its parent and its children; collective over ``comm`` (mpi4py).

    Returns an empty list on every rank, after a warning of rank 0, when the hosts cannot reach each
    other over TCP: training works without, only a dead rank is then not named.

    Args:
        comm: the job.
        tree: this rank's _core.Tree.
    """
    if comm.Get_size() == 1:
        return []
    label = f"host {socket.gethostname()}, pid {os.getpid()}"
    # The children first: a parent waits for all of its own, however far they have come.
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
            # Not a Python warning: made an error, it would leave the other ranks waiting.
            text = (
                f"{fault}; a rank that dies cannot be named. QSGD_LIFELINE=0 suppresses this "
                "warning"
            )
            print(f"qsgd-hpc: warning: {text}", file=sys.stderr, flush=True)
        return []
    _open.extend(fd for fd, _, _ in peers)
    return peers


class Greeter:
    """A parent's end of the greetings: waits for all connections at once.

    Port scanners and health checks connect to every port. One that is silent, slow or says
    something else delays no rank; what greets right and leaves is found by the lifeline itself.
    A context manager: at its end it closes all but the connections in `found`.

    Args:
        server: a listening socket.
        token: what a rank of this job knows.
        ranks: which are to come.
    """

    def __init__(self, server: socket.socket, token: bytes, ranks: Collection[int]) -> None:
        self.found: dict[int, socket.socket] = {}
        self._server, self._token, self._ranks = server, token, ranks
        self._heard: dict[socket.socket, bytearray] = {}  # the one that came first is first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Greeter:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in list(self._heard):
            self._let_go(sock).close()
        self._selector.close()

    def complete(self) -> bool:
        """Return whether all have greeted."""
        return len(self.found) == len(self._ranks)

    def greet(self, patience_s: float) -> bool:
        """Take what has come, after waiting for it; tell whether a rank was among it."""
        before = len(self.found)
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._heard:  # not let go meanwhile, to make room
                self._hear(key.fileobj)
        return len(self.found) > before

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sock.setblocking(False)
            if len(self._heard) >= MOST_WAITING:
                # A rank greets as soon as it is connected: the oldest is the likeliest stranger.
                self._let_go(next(iter(self._heard))).close()
            self._heard[sock] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: Any) -> None:
        heard = self._heard[sock]
        with contextlib.suppress(BlockingIOError):
            try:
                piece = sock.recv(_GREETING.size - len(heard))
            except ConnectionError:
                piece = b""
            heard += piece
            if piece and len(heard) < _GREETING.size:
                return
            rank = self._answer(self._let_go(sock), bytes(heard))
            if rank is None:
                sock.close()  # a stranger found the port
            else:
                self.found[rank] = sock

    def _answer(self, sock: socket.socket, greeting: bytes) -> int | None:
        """Return the rank that has greeted, once it has its answer; None for a stranger."""
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

    def _let_go(self, sock: socket.socket) -> socket.socket:
        self._selector.unregister(sock)
        del self._heard[sock]
        return sock


def _accept_children(comm: Any, children: Collection[int], label: str) -> Peers:
    token = secrets.token_bytes(TOKEN_BYTES)
    with (
        socket.create_server(("", 0), backlog=len(children) + MOST_WAITING) as server,
        Greeter(server, token, children) as greeter,
    ):
        door = (own_addresses(), server.getsockname()[1], token, label)
        told = [comm.isend(door, child) for child in children]
        heard_s = time.monotonic()
        while not greeter.complete() and time.monotonic() < heard_s + CONNECT_TIMEOUT_S:
            # Some networks move a message only while its sender is inside MPI, and the others wait
            # for this one.
            comm.Iprobe()
            if greeter.greet(PROGRESS_S):
                heard_s = time.monotonic()
    labels = {child: comm.recv(source=child) for child in children}
    for request in told:
        request.wait()
    return [(_detach(greeter.found[rank]), rank, labels[rank]) for rank in sorted(greeter.found)]


def _reach_parent(comm: Any, parent: int, label: str) -> Peers:
    told = comm.isend(label, parent)
    addresses, port, token, theirs = comm.recv(source=parent)
    peers = _greet(addresses, port, token, comm.Get_rank(), near=_host(theirs) == _host(label))
    told.wait()
    return [(fd, parent, theirs) for fd in peers]


def _greet(addresses: list[str], port: int, token: bytes, rank: int, *, near: bool) -> list[int]:
    """Return the connection to the parent, or none."""
    if near:
        addresses = [_LOOPBACK, *addresses]  # asks no name server, which may take seconds
    for address in dict.fromkeys(addresses):
        try:
            sock = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S / 4)
        except OSError:
            continue
        # Hosts may bear one name, and others may listen at the same port: only the parent answers
        # so, and it waits longer than one of them may be silent.
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
