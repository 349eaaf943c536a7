"""Functions that travel to the ranks, and strangers at the ports where these meet.

Strangers delay no rank, and no rank takes them for its own. Port scanners and health checks connect
to every port: some say nothing, some speak HTTP.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Iterator

import cloudpickle
import pytest

from qsgd_hpc.launch import exchange
from qsgd_hpc.launch.exchange import Exchange, dumps_by_value, fetch
from qsgd_hpc.runtime.lifeline import MOST_WAITING, TOKEN_BYTES, Greeter

TOKEN = secrets.token_bytes(TOKEN_BYTES)
RANKS = 4
HTTP = b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n"


def greeting(rank: int, token: bytes = TOKEN) -> bytes:
    return token + struct.pack("!I", rank)


@pytest.fixture
def door() -> Iterator[tuple[Greeter, tuple[str, int]]]:
    """Rank 0's Greeter, and the address where it listens."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=4 * MOST_WAITING) as server,
        Greeter(server, TOKEN, range(1, RANKS)) as greeter,
    ):
        yield greeter, server.getsockname()


def meet(greeter: Greeter) -> None:
    by_s = time.monotonic() + 60
    while not greeter.complete():
        assert time.monotonic() < by_s, sorted(greeter.found)
        greeter.greet(1)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00",
        HTTP,
        TOKEN,
        greeting(0),
        greeting(RANKS),
        greeting(1, bytes(TOKEN_BYTES)),
        secrets.token_bytes(1 << 16),
    ],
    ids=["nothing", "a_byte", "http", "a_part", "rank_0", "no_rank", "no_token", "much"],
)
@pytest.mark.parametrize("strangers", [1, 3 * MOST_WAITING])
def test_ranks_meet_beside_strangers(door, said: bytes, strangers: int):
    greeter, address = door
    with contextlib.ExitStack() as stack:
        for _ in range(strangers):
            sock = stack.enter_context(socket.create_connection(address))
            sock.setblocking(False)  # what is not read may not hold up the test
            with contextlib.suppress(BlockingIOError):
                sock.send(said)
            greeter.greet(0)
        ranks = [stack.enter_context(socket.create_connection(address)) for _ in range(1, RANKS)]
        for rank, sock in enumerate(ranks, 1):
            sock.sendall(greeting(rank))
        meet(greeter)
        for rank, sock in enumerate(ranks, 1):
            assert sock.recv(TOKEN_BYTES) == TOKEN
            assert greeter.found[rank].getpeername() == sock.getsockname()
            greeter.found[rank].close()


def test_a_greeting_may_come_byte_by_byte_while_others_leave(door):
    greeter, address = door
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(socket.create_connection(address)) for _ in range(1, RANKS)]
        for at in range(len(greeting(1))):
            for rank, sock in enumerate(ranks, 1):
                sock.sendall(greeting(rank)[at : at + 1])
            with socket.create_connection(address) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                greeter.greet(0)
        meet(greeter)
        for sock in greeter.found.values():
            sock.close()


def test_connections_without_a_greeting_are_few_and_closed_at_the_end(door):
    greeter, address = door
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(MOST_WAITING + 2):
            strangers.append(stack.enter_context(socket.create_connection(address)))
            assert not greeter.greet(60)
        for sock in strangers[:2]:  # the oldest made room
            assert sock.recv(1) == b""
        greeter.__exit__()
        for sock in strangers[2:]:
            assert sock.recv(1) == b""


def test_a_stranger_at_the_exchange_gets_nothing_and_does_not_stay(monkeypatch):
    monkeypatch.setattr(exchange, "CONNECT_TIMEOUT_S", 0.2)
    with Exchange((max, (2, 3), {})) as there:
        port = int(there.address.split(";")[1])
        for said in (b"", HTTP, bytes(20)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.settimeout(60)
                stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""


class Trap:
    """Fails the test where it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("what a stranger sent was unpickled",)


def test_a_rank_trusts_no_other_server_and_goes_on_to_the_next_address(monkeypatch):
    monkeypatch.setattr(exchange, "CONNECT_TIMEOUT_S", 0.5)
    call = pickle.dumps(Trap())
    seen: list[str] = []
    threads, port = [], 0
    for host, said in (("127.0.0.2", struct.pack("!Q", len(call)) + call), ("127.0.0.3", b"")):
        server = socket.create_server((host, port))
        port = server.getsockname()[1]
        threads.append(threading.Thread(target=_serve, args=(server, said, seen)))
        threads[-1].start()
    word = bytes(TOKEN_BYTES).hex()
    with pytest.raises(ConnectionError, match=r"rank 1 .* cannot reach the launching host"):
        fetch(f"127.0.0.2,127.0.0.3;{port};{word};{word}", 1)
    for thread in threads:
        thread.join()
    assert seen == ["127.0.0.2", "127.0.0.3"]


def _serve(server: socket.socket, said: bytes, seen: list[str]) -> None:
    with server, contextlib.suppress(ConnectionError):
        server.settimeout(60)
        sock, _ = server.accept()
        with sock:
            seen.append(server.getsockname()[0])
            sock.sendall(said)
            while sock.recv(1 << 10):
                pass


def make():
    factor = 3

    class Local:
        def fail(self):
            raise KeyError("in a class")

    def outer(x):
        def inner():
            if x > 1:
                raise KeyError("in a closure")
            return factor * x

        return inner() if x else Local().fail()

    return outer


def sent(function):
    """Return the function as a rank gets it, by value as from a script."""
    module = __import__(__name__, fromlist=["make"])
    cloudpickle.register_pickle_by_value(module)
    try:
        return pickle.loads(dumps_by_value(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize(
    ("argument", "line"),
    ((2, 'raise KeyError("in a closure")'), (0, 'raise KeyError("in a class")')),
)
def test_tracebacks_show_the_lines_of_the_script(argument, line):
    function = sent(make())
    assert function(1) == 3
    with pytest.raises(KeyError) as raised:
        function(argument)
    text = "".join(traceback.format_exception(raised.value))
    assert line in text
    assert f'File "{__file__}"' in text
