"""Streams, events and memory through the kernels' library: those of a device, or of the twin."""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.twin import Kernels

LATE_S = 0.02  # time for a missing wait to show; correct code passes with any
MEGABYTES = 64


class Order:
    """Streams and events are handles, memory of the device an address, pinned memory an array."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._ends: list[tuple[str, Any]] = []

    def call(self, name: str, *arguments: Any) -> None:
        """Call an entry of the table; raise what it says."""
        if why := getattr(self.kernels.table, name)(*arguments):
            raise RuntimeError(why.decode())

    def stream(self) -> int:
        return self._made("make_stream", "end_stream")

    def event(self) -> int:
        return self._made("make_event", "end_event")

    def recorded(self, stream: int | None) -> int:
        """Return an event that passes once what is in the stream is done."""
        event = self.event()
        self.call("record", event, stream)
        return event

    def passed(self, event: int) -> bool:
        passed = c.c_bool()
        self.call("passed", event, passed)
        return passed.value

    def finish(self, stream: int | None) -> None:
        """Poll until what is in the stream is done."""
        event = self.recorded(stream)
        while not self.passed(event):
            time.sleep(1e-4)

    def copy(self, to: int, source: int, size_bytes: int, stream: int | None) -> None:
        self.call("copy", to, source, size_bytes, stream)

    def device(self, size_bytes: int, stream: int | None) -> int:
        """Take memory of the device."""
        memory = c.c_void_p()
        self.call("take", size_bytes, memory, stream)
        return self._keep("give", memory.value)

    def pinned(self, count: int, dtype: Any = np.float32) -> NDArray[Any]:
        memory = c.c_void_p()
        size_bytes = count * np.dtype(dtype).itemsize
        self.call("take_pinned", size_bytes, memory)
        at = self._keep("give_pinned", memory.value)
        return np.frombuffer((c.c_uint8 * size_bytes).from_address(at), dtype=dtype)

    @contextmanager
    def late(self, *streams: int | None) -> Iterator[None]:
        """Queue what the body does behind other work: on the twin, until the body has ended."""
        if not self.twin:
            for stream in streams:
                size_bytes = MEGABYTES << 20
                memory = self.device(size_bytes, stream)
                for _ in range(32):
                    self.call("clear", memory, size_bytes, stream)
            yield
            return
        for stream in streams:
            self.kernels.hold(stream, True)
        try:
            yield
            time.sleep(LATE_S)  # what does not wait for them runs now
        finally:
            for stream in streams:
                self.kernels.hold(stream, False)

    @property
    def twin(self) -> bool:
        return self.kernels.table.platform == b"twin"

    def end(self) -> None:
        """Give back all there is, once the work of its streams is done."""
        for name, handle in self._ends:
            if name == "end_stream":
                self.finish(handle)
        for name, handle in reversed(self._ends):
            self.call(name, handle, *([None] if name == "give" else []))

    def _made(self, make: str, end: str) -> int:
        handle = c.c_void_p()
        self.call(make, handle)
        return self._keep(end, handle.value)

    def _keep(self, end: str, handle: int | None) -> int:
        assert handle is not None
        self._ends.append((end, handle))
        return handle
