"""XLA's side of a custom call for a GPU, over numpy arrays: it calls the handler as XLA does.

The structures are those of XLA's ``c_api.h``.
"""

from __future__ import annotations

import ctypes as c
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import _core

FLOAT32, STRING, BUFFER, EXECUTE = 11, 4, 1, 3


class Header(c.Structure):
    _fields_ = [("size", c.c_size_t), ("extensions", c.c_void_p)]


class Version(c.Structure):
    _fields_ = [("header", Header), ("major", c.c_int32), ("minor", c.c_int32)]


class Buffer(c.Structure):
    _fields_ = [
        ("header", Header), ("type", c.c_int32), ("data", c.c_void_p), ("rank", c.c_int64),
        ("dims", c.POINTER(c.c_int64)),
    ]  # fmt: skip


class Buffers(c.Structure):
    _fields_ = [
        ("header", Header), ("count", c.c_int64), ("kinds", c.POINTER(c.c_int32)),
        ("buffers", c.POINTER(c.POINTER(Buffer))),
    ]  # fmt: skip


class Bytes(c.Structure):
    _fields_ = [("data", c.c_char_p), ("size", c.c_size_t)]


class Attributes(c.Structure):
    _fields_ = [
        ("header", Header), ("count", c.c_int64), ("kinds", c.POINTER(c.c_int32)),
        ("names", c.c_void_p), ("values", c.POINTER(c.c_void_p)),
    ]  # fmt: skip


class ErrorCreate(c.Structure):
    _fields_ = [("header", Header), ("message", c.c_char_p), ("code", c.c_int32)]


class StreamGet(c.Structure):
    _fields_ = [("header", Header), ("context", c.c_void_p), ("stream", c.c_void_p)]


class DeviceGet(c.Structure):
    _fields_ = [("header", Header), ("context", c.c_void_p), ("ordinal", c.c_int32)]


def _entry(argument: Any) -> Any:
    return c.CFUNCTYPE(c.c_void_p, c.POINTER(argument))


class Api(c.Structure):
    _fields_ = [
        ("header", Header), ("version", Version), ("internal", c.c_void_p),
        ("error_create", _entry(ErrorCreate)),
        ("error_get_message", c.c_void_p), ("error_destroy", c.c_void_p),
        ("handler_register", c.c_void_p),
        ("stream_get", _entry(StreamGet)),
        ("type_register", c.c_void_p), ("context_get", c.c_void_p), ("state_set", c.c_void_p),
        ("state_get", c.c_void_p), ("memory_allocate", c.c_void_p), ("memory_free", c.c_void_p),
        ("pool_schedule", c.c_void_p), ("pool_size", c.c_void_p),
        ("future_create", c.c_void_p), ("future_available", c.c_void_p),
        ("future_error", c.c_void_p), ("run_id", c.c_void_p),
        ("device_ordinal", _entry(DeviceGet)),
    ]  # fmt: skip


class Frame(c.Structure):
    _fields_ = [
        ("header", Header), ("api", c.POINTER(Api)), ("context", c.c_void_p),
        ("stage", c.c_int32), ("arguments", Buffers), ("results", Buffers),
        ("attributes", Attributes), ("future", c.c_void_p),
    ]  # fmt: skip


def header_of(kind: Any) -> Header:
    return Header(c.sizeof(kind), None)


def program(operation: _core.Operation, rows: Sequence[int] = (), size: int = 1) -> bytes:
    """Return what a compiled program of rank 0 says of a call on one array."""
    text = operation.text()
    job = struct.pack("=iiI", 0, size, 1)
    lists = b"".join(struct.pack(f"=I{len(n)}q", len(n), *n) for n in (rows, ()))
    return (job + struct.pack("=I", len(text)) + text + lists).hex().encode()


class Xla:
    """The runtime of a program on one device, with one stream."""

    def __init__(self, stream: int, device: int = 0) -> None:
        self.failure: str | None = None
        handler = _core.xla_device_collective(streams=True)
        pointer = c.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
        self._handler = c.CFUNCTYPE(c.c_void_p, c.POINTER(Frame))(pointer(handler, None))
        self._stream, self._device = stream, device
        self.api = Api(header_of(Api), Version(header_of(Version), 0, 4))
        self.api.error_create = _entry(ErrorCreate)(self._fail)
        self.api.stream_get = _entry(StreamGet)(self._tell_stream)
        self.api.device_ordinal = _entry(DeviceGet)(self._tell_device)

    def _fail(self, error: Any) -> int:
        self.failure = error.contents.message.decode()
        return 1

    def _tell_stream(self, asked: Any) -> int:
        asked.contents.stream = self._stream
        return 0

    def _tell_device(self, asked: Any) -> int:
        asked.contents.ordinal = self._device
        return 0

    def call(self, text: bytes, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Call the handler on this thread; ``failure`` is what it has answered."""
        value = Bytes(text, len(text))
        attributes = Attributes(
            header_of(Attributes), 1, (c.c_int32 * 1)(STRING), None,
            (c.c_void_p * 1)(c.addressof(value)),
        )  # fmt: skip
        frame = Frame(
            header_of(Frame), c.pointer(self.api), None, EXECUTE, _buffers(x), _buffers(out),
            attributes, None,
        )  # fmt: skip
        failed = self._handler(frame)
        assert bool(failed) == (self.failure is not None)


def _buffers(array: NDArray[np.float32]) -> Buffers:
    dims = (c.c_int64 * array.ndim)(*array.shape)
    buffer = Buffer(header_of(Buffer), FLOAT32, array.ctypes.data, array.ndim, dims)
    listed = (c.POINTER(Buffer) * 1)(c.pointer(buffer))
    return Buffers(header_of(Buffers), 1, (c.c_int32 * 1)(BUFFER), listed)
