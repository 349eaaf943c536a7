"""The GPU kernels' entry points over numpy arrays: of a device's library, or of the twin.

The twin is the same source compiled for the CPU, run thread by thread on host memory.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import _core
from tests import reference, reference_eden
from tests.core.build import ROOT, native_compiler
from tests.gpu.memory import Memory

KEY = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
Bytes = NDArray[np.uint8]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


class CodecSpec(c.Structure):
    _fields_ = [
        ("scheme", c.c_uint8), ("bits", c.c_int), ("norm", c.c_uint8), ("rounding", c.c_uint8),
        ("bucket", c.c_uint32), ("k", c.c_uint32), ("contract", c.c_bool),
    ]  # fmt: skip


class Piece(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "at",
            "count",
            "first",
            "tensor",
            "scales_at",
            "codes_at",
            "first_bucket",
            "residual",
            "owner_residual",
        )
    ]


class Pieces(c.Structure):
    _fields_ = [
        ("list", c.c_void_p), ("size", c.c_uint32), ("buckets", c.c_uint64), ("only", Piece),
    ]  # fmt: skip


class Draw(c.Structure):
    _fields_ = [("step", c.c_uint32), ("who", c.c_uint32), ("later", c.c_void_p)]


class Run(c.Structure):
    _fields_ = [
        ("pieces", Pieces), ("dtype", c.c_uint8), ("spec", CodecSpec), ("nonfinite", c.c_void_p),
    ]  # fmt: skip


class Addends(c.Structure):
    _fields_ = [
        ("messages", c.c_void_p), ("stride", c.c_uint64), ("ranks", c.c_int), ("own", c.c_int),
        ("factor", c.c_float),
    ]  # fmt: skip


class Span(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in ("at", "to", "count", "first_block")]


class Spans(c.Structure):
    _fields_ = [("list", c.c_void_p), ("size", c.c_uint32), ("blocks", c.c_uint64)]


SCALED = 4096  # elements of a block


def _entry(*arguments: Any) -> Any:
    return c.CFUNCTYPE(c.c_char_p, *arguments)


_RUN, _DRAW, _ADDENDS = c.POINTER(Run), c.POINTER(Draw), c.POINTER(Addends)
_SPANS = c.POINTER(Spans)
_MEMORY = _STREAM = _EVENT = c.c_void_p
_MADE = c.POINTER(c.c_void_p)  # where a new one is put
VERSION = 3


class _Table(c.Structure):
    _fields_ = [
        ("version", c.c_int),
        ("platform", c.c_char_p),
        ("refuse", _entry(c.POINTER(CodecSpec))),
        ("encode", _entry(c.c_void_p, _RUN, _DRAW, c.c_void_p, c.c_void_p)),
        ("decode", _entry(c.c_void_p, _RUN, c.c_void_p, c.c_void_p)),
        ("sum", _entry(_ADDENDS, c.c_void_p, _RUN, c.c_void_p, c.c_void_p)),
        ("sum_encode", _entry(_ADDENDS, c.c_void_p, _RUN, _DRAW, c.c_void_p, c.c_void_p)),
        ("judge", _entry(c.c_void_p, c.c_void_p, _RUN, c.c_uint32, c.c_void_p, c.c_void_p)),
        ("scale", _entry(_SPANS, c.c_uint8, c.c_double, c.c_int, c.c_void_p, c.c_void_p)),
        ("use", _entry(c.c_int, c.c_void_p)),
        ("identify", _entry(c.c_int, c.c_char_p)),
        ("make_stream", _entry(_MADE)),
        ("end_stream", _entry(_STREAM)),
        ("make_event", _entry(_MADE)),
        ("end_event", _entry(_EVENT)),
        ("record", _entry(_EVENT, _STREAM)),
        ("wait", _entry(_STREAM, _EVENT)),
        ("passed", _entry(_EVENT, c.POINTER(c.c_bool))),
        ("copy", _entry(_MEMORY, _MEMORY, c.c_size_t, _STREAM)),
        ("clear", _entry(_MEMORY, c.c_size_t, _STREAM)),
        ("take_pinned", _entry(c.c_size_t, _MADE)),
        ("give_pinned", _entry(_MEMORY)),
        ("take", _entry(c.c_size_t, _MADE, _STREAM)),
        ("give", _entry(_MEMORY, _STREAM)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Code:
    """What a run is coded as; `bucket` in elements."""

    bits: int = 4
    norm: str = "max"
    rounding: str = "stochastic"
    bucket: int = 512
    contract: bool = False
    scheme: str = "qsgd"

    def spec(self) -> CodecSpec:
        norm, rounding = self.norm == "l2", self.rounding == "nearest"
        scheme = _core.SCHEMES.index(self.scheme)
        return CodecSpec(scheme, self.bits, norm, rounding, self.bucket, 0, self.contract)

    def scale_bytes(self, count: int) -> int:
        return 4 * -(-count // self.bucket)

    def bytes(self, count: int) -> int:
        """Of a message of one piece: its scales, then its codes."""
        rest = count % self.bucket
        if self.scheme == "eden" and rest:
            count += reference_eden.padded(rest) - rest
        return self.scale_bytes(count) + -(-count // 64) * 8 * self.bits


@dataclass(frozen=True)
class Part:
    """A run of a tensor's elements; `at` and `message_at` say where it lies."""

    count: int
    at: int = 0
    first: int = 0
    tensor: int = KEY["tensor"]
    message_at: int = 0
    residual: NDArray[np.float32] | None = None
    owner_residual: NDArray[np.float32] | None = None

    def addresses(self, memory: Memory) -> list[int]:
        both = (self.residual, self.owner_residual)
        return [0 if r is None else memory.address(r) for r in both]


class Kernels:
    """The library's entry points over numpy arrays, which ``memory`` shows to it."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self._library = c.CDLL(str(path))
        self._library.qsgd_gpu_library.restype = c.POINTER(_Table)
        self.table = self._library.qsgd_gpu_library().contents
        assert self.table.version == VERSION
        self.nonfinite = np.zeros(1, dtype=np.uint32)
        self._memory = memory

    def refuse(self, code: Code) -> str:
        """Return why the kernels cannot code so; "": they can."""
        return (self.table.refuse(code.spec()) or b"").decode()

    def hold(self, stream: int | None, held: bool) -> None:
        """Let a stream of the twin start nothing, or go on again; None: all streams."""
        self._library.qsgd_gpu_twin_hold(c.c_void_p(stream), c.c_bool(held))

    def capture(self, stream: int, captured: bool) -> None:
        """Let what is queued in a stream of the twin count as captured in a graph."""
        self._library.qsgd_gpu_twin_capture(c.c_void_p(stream), c.c_bool(captured))

    def allocated(self) -> int:
        """Return the bytes of pinned memory and of devices that the twin has allocated."""
        count = self._library.qsgd_gpu_twin_allocated
        count.restype = c.c_size_t
        return int(count())

    def misplaced(self) -> int:
        """Return how many queries were of events of another device than the thread's current."""
        return int(self._library.qsgd_gpu_twin_misplaced())

    def collectives(self) -> int:
        """Return how many collectives of the twin's NCCL this process has begun."""
        return int(self._library.qsgd_nccl_twin_collectives())

    def encode(
        self,
        x: NDArray[Any],
        code: Code,
        parts: Sequence[Part] = (),
        *,
        dtype: str = "",
        rank: int = KEY["rank"],
        phase: int = 1,
        later: int | None = None,
    ) -> Bytes:
        """Return the message of these parts of x; by default of all of it."""
        message, run = self._message(x, code, parts, dtype)
        draw = self.draw(rank, phase, later)
        place = self._memory.address
        self._check(self.table.encode(place(x), run, draw, place(message), None))
        return message

    def decode(
        self,
        message: Bytes,
        out: NDArray[Any],
        code: Code,
        parts: Sequence[Part] = (),
        *,
        dtype: str = "",
    ) -> None:
        run = self._run(out, code, parts, dtype)
        place = self._memory.address
        self._check(self.table.decode(place(message), run, place(out), None))

    def sum(
        self,
        messages: Bytes,
        own: int,
        x: NDArray[Any],
        code: Code,
        parts: Sequence[Part] = (),
        *,
        factor: float = 1.0,
    ) -> NDArray[Any]:
        """Return the sum as rank `own` would; row r of `messages` is rank r's."""
        run, out = self._run(x, code, parts, ""), x.copy()
        place = self._memory.address
        self._check(
            self.table.sum(self._addends(messages, own, factor), place(x), run, place(out), None)
        )
        return out

    def sum_encode(
        self,
        messages: Bytes,
        own: int,
        x: NDArray[Any],
        code: Code,
        parts: Sequence[Part] = (),
        *,
        factor: float = 1.0,
        rank: int = KEY["rank"],
    ) -> Bytes:
        """Code the sum as rank `own` would; row r of `messages` is rank r's."""
        message, run = self._message(x, code, parts, "")
        place = self._memory.address
        addends, draw = self._addends(messages, own, factor), self.draw(rank, 2)
        self._check(self.table.sum_encode(addends, place(x), run, draw, place(message), None))
        return message

    def _addends(self, messages: Bytes, own: int, factor: float) -> Addends:
        at = self._memory.address(messages)
        return Addends(at, messages.strides[0], len(messages), own, c.c_float(factor))

    def draw(self, rank: int = KEY["rank"], phase: int = 1, later: int | None = None) -> Draw:
        at = None if later is None else self._memory.address(np.array([later], dtype=np.uint32))
        return Draw(KEY["step"], rank << 4 | phase, at)

    @staticmethod
    def whole(count: int, code: Code) -> Run:
        """Return the run of one float32 tensor, which needs nothing in the device's memory."""
        stirred = reference.stirred(KEY["seed"], KEY["tensor"])
        piece = Piece(0, count, 0, stirred, 0, code.scale_bytes(count), 0, 0, 0)
        pieces = Pieces(None, 1, -(-count // code.bucket), piece)
        return Run(pieces, DTYPES.index("float32"), code.spec(), None)

    def judge(
        self,
        x: NDArray[Any] | None,
        message: Bytes,
        code: Code,
        parts: Sequence[Part],
        *,
        every: int = 1,
        dtype: str = "float32",
    ) -> NDArray[np.float64]:
        """Return the squared error and the squared magnitude of each part's sample, above 1000.

        The kernels add to what is there.
        """
        sums = np.full((len(parts), 2), 1000.0)
        run = self._run(np.empty(0, dtype=np.float32), code, parts, dtype)
        place = self._memory.address
        at = None if x is None else place(x)
        self._check(self.table.judge(at, place(message), run, every, place(sums), None))
        return sums - 1000

    def scale(
        self,
        arrays: Sequence[NDArray[Any]],
        to: Sequence[NDArray[Any]] | None,
        factor: float = 1.0,
        divisor: int = 1,
        *,
        dtype: str = "",
    ) -> list[bool]:
        """Copy arrays of one type, scaled, and return which then have NaN or Inf.

        Args:
            to: as many arrays; None: the arrays are only looked at.
        """
        spans, blocks = [], 0
        place = self._memory.address
        for i, x in enumerate(arrays):
            spans.append(Span(place(x), place(to[i]) if to else 0, x.size, blocks))
            blocks += -(-x.size // SCALED)
        table = np.frombuffer((Span * len(spans))(*spans), dtype=np.uint8)
        nonfinite = np.zeros(len(spans), dtype=np.uint32)
        number = DTYPES.index(dtype or arrays[0].dtype.name)
        listed = Spans(place(table), len(spans), blocks)
        self._check(self.table.scale(listed, number, factor, divisor, place(nonfinite), None))
        return [bool(n) for n in nonfinite]

    def _message(
        self, x: NDArray[Any], code: Code, parts: Sequence[Part], dtype: str
    ) -> tuple[Bytes, Run]:
        run = self._run(x, code, parts, dtype)
        size = max(p.message_at + code.bytes(p.count) for p in parts or [Part(x.size)])
        return np.full(size, 0xEE, dtype=np.uint8), run

    def _run(self, x: NDArray[Any], code: Code, parts: Sequence[Part], dtype: str) -> Run:
        self.nonfinite[:] = 0
        pieces, buckets = [], 0
        for part in parts or [Part(x.size)]:
            codes_at = part.message_at + code.scale_bytes(part.count)
            stirred = reference.stirred(KEY["seed"], part.tensor)
            pieces.append(
                Piece(
                    part.at,
                    part.count,
                    part.first,
                    stirred,
                    part.message_at,
                    codes_at,
                    buckets,
                    *part.addresses(self._memory),
                )
            )
            buckets += -(-part.count // code.bucket)
        if parts:
            table = np.frombuffer((Piece * len(pieces))(*pieces), dtype=np.uint8)
            listed = Pieces(self._memory.address(table), len(pieces), buckets, Piece())
        else:
            listed = Pieces(None, 1, buckets, pieces[0])
        number = DTYPES.index(dtype or x.dtype.name)
        return Run(listed, number, code.spec(), self._memory.address(self.nonfinite))

    def _check(self, why: bytes | None) -> None:
        self._memory.fetch()
        if why is not None:
            raise RuntimeError(why.decode())


def compile_twin(folder: Path) -> Path:
    """Compile the kernels for the CPU, with checks of undefined behaviour, and return the path.

    The folder keeps the library of the last sources, which is taken if they are the same.
    """
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
             "-ffp-contract=off", "-fsanitize=undefined", "-fno-sanitize-recover=all",
             "-fno-sanitize=float-cast-overflow,vptr", "-shared", "-fPIC", "-pthread",
             "-DQSGD_GPU_TWIN", "-DQSGD_NO_CLONES",
             f"-I{ROOT / 'csrc'}", f"-I{Path(__file__).parent}"]  # fmt: skip
    source = ROOT / "csrc" / "gpu" / "codec.cu"
    headers = [*(ROOT / "csrc").rglob("*.h"), *Path(__file__).parent.glob("*.h")]
    command = [*native_compiler(), *flags, "-x", "c++", str(source)]
    digest = hashlib.sha256(" ".join(command).encode())
    for path in (source, *sorted(headers)):
        digest.update(path.read_bytes())
    target = folder / f"libqsgd_gpu_twin-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        for old in folder.glob("*.so"):
            old.unlink()
        whole = target.with_suffix(".part")
        subprocess.run([*command, "-o", whole], check=True)
        whole.rename(target)
    return target
