"""Send a function call to every rank over TCP, and collect the results.

No files are used, because ranks may be on hosts without a shared file system.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import pickle
import secrets
import socket
import socketserver
import struct
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from qsgd_hpc.errors import LaunchError, RankFailedError
from qsgd_hpc.launch.hold_port import own_addresses
from qsgd_hpc.launch.output import list_ranks

__all__ = ["VARIABLE", "Exchange", "Failure", "Returned", "answer", "dumps_by_value", "fetch"]

VARIABLE = "QSGD_RUN_FUNCTION"
CONNECT_TIMEOUT_S = 20.0
_TOKEN_BYTES = 16  # of the token that identifies a rank, and of the proof that answers it
_GREETING = struct.Struct(f"!{_TOKEN_BYTES}sI")
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Returned:
    """The result of a rank's call."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """The exception of a rank's call."""

    traceback: str
    exception: bytes | None
    """The pickled exception, or None if it cannot be pickled."""

    def raised(self) -> BaseException | None:
        """Return the exception."""
        return None if self.exception is None else pickle.loads(self.exception)  # type: ignore[no-any-return]


class Exchange:
    """A server for the lifetime of the ranks; a context manager.

    Args:
        call: function, arguments and keyword arguments; all must be picklable by cloudpickle.
    """

    def __init__(self, call: tuple[Any, ...]) -> None:
        # Functions of modules are pickled by name: ranks need this process's module search path.
        self.call = pickle.dumps((_own_first(sys.path), dumps_by_value(call)))
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.proof = secrets.token_bytes(_TOKEN_BYTES)
        self.answers: dict[int, bytes] = {}
        """Pickled Returned or Failure by rank, in the order of arrival."""
        self._server = _Server(("", 0), _Handler)
        self._server.exchange = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def address(self) -> str:
        """The address for a rank: hosts, port, token and proof."""
        hosts = ",".join(own_addresses())
        port = self._server.server_address[1]
        return f"{hosts};{port};{self.token.hex()};{self.proof.hex()}"

    def results(self, ranks: int, code: int) -> list[Any]:
        """Return the values by rank.

        Args:
            ranks: number of ranks.
            code: the job's exit code.
        Raises:
            LaunchError: a rank failed; its cause is the exception of the first rank that failed.
        """
        found = {rank: pickle.loads(data) for rank, data in self.answers.items()}
        failures = {rank: each for rank, each in found.items() if isinstance(each, Failure)}
        raised = {rank: each.raised() for rank, each in failures.items()}
        # Ranks that only report another rank's failure are not the cause.
        causes = [rank for rank in failures if not isinstance(raised[rank], RankFailedError)]
        for rank in (*causes, *failures):
            error = LaunchError(f"qsgd_hpc.run: rank {rank} failed:\n{failures[rank].traceback}")
            raise error from raised[rank]
        missing = sorted(set(range(ranks)) - set(found))
        if missing or code != 0:
            raise LaunchError(
                f"qsgd_hpc.run: the job ended with code {code}"
                + (f" and without a result of {list_ranks(missing)}" if missing else "")
                + "; its message is above"
            )
        return [found[rank].value for rank in range(ranks)]

    def __enter__(self) -> Exchange:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    exchange: Exchange
    request_queue_size = 1024
    daemon_threads = True  # do not wait for a rank that hangs


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        exchange = self.server.exchange  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, EOFError):  # a rank that dies sends no answer
            self.request.settimeout(CONNECT_TIMEOUT_S)  # drops other programs that send nothing
            token, rank = _GREETING.unpack(_exactly(self.request, _GREETING.size))
            if hmac.compare_digest(token, exchange.token):
                self.request.settimeout(None)
                self.request.sendall(exchange.proof)
                send(self.request, exchange.call)
                exchange.answers[rank] = receive(self.request)
                send(self.request, b"")  # so that a rank does not end before its answer has arrived


def _own_first(path: list[str]) -> tuple[list[str], list[str]]:
    """Return the folders before Python's own modules (the script's, PYTHONPATH), and the others."""
    library = sysconfig.get_path("stdlib")
    at = path.index(library) if library in path else 0
    return path[:at], path[at:]


def send(sock: socket.socket, data: bytes) -> None:
    """Send bytes, preceded by their length."""
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> bytes:
    """Receive the bytes of one ``send``.

    Raises:
        EOFError: the peer has closed the connection.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError(f"the connection ended after {len(data)} of {count} bytes")
        data += piece
    return bytes(data)


def fetch(address: str, rank: int) -> tuple[socket.socket, tuple[Any, ...]]:
    """Connect a rank to the Exchange; return the connection and the function call.

    Raises:
        ConnectionError: none of the launching host's addresses answers.
    """
    hosts, port, token, proof = address.split(";")
    greeting = _GREETING.pack(bytes.fromhex(token), rank)
    for host in hosts.split(","):
        sock = _reach((host, int(port)), greeting, bytes.fromhex(proof))
        if sock is not None:
            (first, last), call = pickle.loads(receive(sock))
            # A module test.py beside the script must hide Python's own test, as it does there.
            sys.path[:0] = [each for each in first if each not in sys.path]
            sys.path.extend(each for each in last if each not in sys.path)
            return sock, pickle.loads(call)
    raise ConnectionError(
        f"rank {rank} on {socket.gethostname()} cannot reach the launching host over TCP (tried "
        f"{hosts}, port {port}); allow it in the firewall"
    )


def _reach(address: tuple[str, int], greeting: bytes, proof: bytes) -> socket.socket | None:
    """Connect to the Exchange; None if there is none.

    Another program may listen at this address, on a host of the same name or at 127.0.0.1. It may
    be silent, and its answer must not be unpickled.
    """
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, EOFError):
        sock = stack.enter_context(socket.create_connection(address, CONNECT_TIMEOUT_S / 4))
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.sendall(greeting)
        if hmac.compare_digest(_exactly(sock, len(proof)), proof):
            sock.settimeout(None)
            stack.pop_all()  # stays open
            return sock
    return None


def answer(sock: socket.socket, what: Returned | Failure) -> None:
    """Send the result of a call; return when the launching process has received it."""
    send(sock, dumps_by_value(what))
    receive(sock)


def dumps_by_value(what: object) -> bytes:
    """Return a pickle of ``what``, including functions of scripts and closures."""
    file = io.BytesIO()
    _Pickler(file).dump(what)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        # cloudpickle 3.1.3 names every file "<dynamic-code>", so tracebacks would lack the source.
        return _code, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))


def _code(filename: str, make: Callable[..., types.CodeType], args: Any) -> types.CodeType:
    return make(*args).replace(co_filename=filename)
