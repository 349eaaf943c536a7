"""Split mpiexec's merged output into the ranks' output, starts and ends."""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.launch.supervise import END, ERR, MARK, NETWORK, OUT, START

__all__ = ["Decoder", "Ended", "Links", "Output", "Raw", "Started"]


@dataclass(frozen=True)
class Started:
    """A rank has started on a host."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote, in order; not necessarily complete lines."""

    rank: int
    is_stderr: bool
    data: bytes


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit code, or minus the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class Links:
    """The keeper's measurements of the hosts' links."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """Bytes outside of frames: mpiexec's own output."""

    data: bytes


Event = Started | Output | Ended | Links | Raw


class Decoder:
    """A decoder of one run's frames, from a byte stream that arrives in arbitrary pieces."""

    def __init__(self, token: str) -> None:
        self._mark = MARK + token.encode()
        self._head = re.compile(rb"([%b])(\d+):" % (START + OUT + ERR + END + NETWORK))
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the frames that the bytes complete."""
        data = self._rest + data
        at = 0
        while True:
            start = data.find(self._mark, at)
            if start < 0:
                break
            end = data.find(b"\n", start)
            if start > at:
                yield Raw(data[at:start])
            at = start
            if end < 0:
                break
            yield self._event(data[start : end + 1])
            at = end + 1
        # Hold back an incomplete frame, or a possible beginning of its mark.
        keep = at if data.startswith(self._mark, at) else max(at, _possible_mark(data, self._mark))
        if keep > at:
            yield Raw(data[at:keep])
        self._rest = data[keep:]

    def finish(self) -> Iterator[Event]:
        """Yield the remaining bytes at the end of the stream."""
        if self._rest:
            yield Raw(self._rest)
        self._rest = b""

    def _event(self, line: bytes) -> Event:
        head = self._head.match(line, len(self._mark))
        if head is None:
            return Raw(line)
        try:
            payload = binascii.a2b_base64(line[head.end() :])
            kind, rank = head[1], int(head[2])
            if kind == START:
                pid, _, host = payload.decode().partition(" ")
                return Started(rank, host, int(pid))
            if kind == NETWORK:
                return Links(json.loads(payload))
            if kind == END:
                return Ended(rank, int(payload))
            return Output(rank, kind == ERR, payload)
        except ValueError:
            return Raw(line)


def _possible_mark(data: bytes, mark: bytes) -> int:
    """Return the start of a truncated mark at the end of the data, else the data's length."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:length]):
            return len(data) - length
    return len(data)
