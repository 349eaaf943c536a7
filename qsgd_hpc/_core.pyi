"""Types of the compiled core; csrc/bindings holds the definitions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Coding = tuple[int, int, str]

class MpiFacts:
    def __init__(
        self,
        *,
        module_path: str,
        library: str,
        pointer_handles: bool,
        comm: int,
        byte_type: int,
        rank: int,
        size: int,
    ) -> None: ...

class EngineConfig:
    def __init__(
        self,
        *,
        seed: int = 0,
        fusion_bytes: int = ...,
        nonfinite: str = "error",
        stall_warning_s: float = 60.0,
        log: Callable[[str], None] | None = None,
    ) -> None: ...

class ThreadWorld:
    def __init__(self, size: int) -> None: ...

class Handle:
    def done(self) -> bool: ...
    def lost(self) -> bool: ...
    def wait(self) -> None: ...

class Engine:
    @staticmethod
    def over_mpi(facts: MpiFacts, config: EngineConfig) -> Engine: ...
    @staticmethod
    def over_threads(world: ThreadWorld, rank: int, config: EngineConfig) -> Engine: ...
    def allreduce(
        self,
        *,
        name: str,
        source: int,
        target: int,
        shape: Sequence[int],
        dtype: str,
        op: str,
        prescale: float,
        postscale: float,
        coding: _Coding | None,
        check_finite: bool,
    ) -> Handle: ...
    def broadcast(
        self, *, name: str, target: int, shape: Sequence[int], dtype: str, root: int
    ) -> Handle: ...
    def watch(self, peers: Sequence[tuple[int, int, str]], grace_s: float) -> None: ...
    def shutdown(self, reason: str, patience_s: float = 1e9) -> None: ...
    def abort(self, message: str) -> None: ...
    def aborted(self) -> str: ...
    def stats(self) -> dict[str, float]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

def encode(
    x: NDArray[np.float32],
    *,
    bits: int,
    bucket_size: int,
    norm: str,
    seed: int = 0,
    tensor: int = 0,
    step: int = 0,
    rank: int = 0,
) -> NDArray[np.uint8]: ...
def decode(
    message: NDArray[np.uint8], *, count: int, bits: int, bucket_size: int, norm: str
) -> NDArray[np.float32]: ...
def thread_allreduce(
    ranks: Sequence[Sequence[NDArray[Any]]],
    *,
    op: str = "sum",
    coding: _Coding | None = None,
    seed: int = 0,
    ids: Sequence[int],
    step: int = 0,
) -> list[int]: ...
