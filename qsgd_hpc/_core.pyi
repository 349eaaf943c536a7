"""Types of the compiled core; csrc/bindings has the definitions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

class CodecSpec:
    def __init__(
        self,
        *,
        scheme: str = "qsgd",
        bits: int | None = None,
        bucket_size: int = 512,
        norm: str = "max",
        rounding: str = "stochastic",
        k: int = 0,
        contract: bool = False,
    ) -> None: ...
    @property
    def scheme(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def bucket_size(self) -> int: ...
    @property
    def biased(self) -> bool: ...
    def bytes(self, count: int) -> int: ...
    def mean_bytes(self, count: int) -> float: ...

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

class RollCall:
    def __init__(
        self,
        *,
        launch: str,
        host: str,
        rank: int,
        ranks: int,
        local_rank: int,
        local_size: int,
        warning_s: float,
        shutdown_s: float,
    ) -> None: ...
    def end(self) -> None: ...

class EngineConfig:
    def __init__(
        self,
        *,
        seed: int = 0,
        fusion_bytes: int = ...,
        nonfinite: str = "error",
        algorithm: str = "auto",
        threads: int = 1,
        planner: str = "off",
        segment_elements: int = 0,
        machine: Machine | None = None,
        measure_at_start: bool = False,
        cache_capacity: int = 1024,
        cycle_time_s: float = 0.0,
        stall_warning_s: float = 60.0,
        stall_shutdown_s: float = 0.0,
        deadlock_s: float = 10.0,
        fan_out: int = 0,
        kept_steps: int = 65536,
        log: Callable[[str], None] | None = None,
        measured: Callable[[Machine], None] | None = None,
        gpu_library: str = "",
        nccl_library: str = "",
    ) -> None: ...

class Tree:
    def __init__(
        self,
        rank: int,
        size: int,
        nodes: Sequence[Sequence[int]] | None = None,
        fan_out: int = 0,
    ) -> None: ...
    @property
    def parent(self) -> int:
        """The parent's rank; -1 for rank 0."""
    @property
    def children(self) -> list[int]: ...
    def below(self, child: int) -> list[int]: ...

class ThreadWorld:
    def __init__(self, size: int) -> None: ...
    @property
    def most_waiting(self) -> int: ...

REGION_BYTES: int
COMPILER: str
ALGORITHMS: tuple[str, ...]
COMPRESSED_ALGORITHMS: tuple[str, ...]
SCHEMES: tuple[str, ...]

class NodeFacts:
    def __init__(self, *, nodes: Sequence[Sequence[int]], bases: Sequence[int]) -> None: ...
    @property
    def nodes(self) -> list[list[int]]: ...

class Communicator:
    @staticmethod
    def over_mpi(
        facts: MpiFacts, node: NodeFacts | None = None, threads: int = 1
    ) -> Communicator: ...
    @staticmethod
    def over_threads(
        world: ThreadWorld, rank: int, ranks_per_node: int | None = None, threads: int = 1
    ) -> Communicator: ...
    def allreduce(
        self,
        tensors: Sequence[NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]],
        *,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        coding: CodecSpec | None = None,
        algorithm: str = "auto",
        seed: int = 0,
        ids: Sequence[int] = (),
        step: int = 0,
        dtype: str = "",
        codings: Sequence[CodecSpec] = (),
    ) -> dict[str, Any]: ...
    def prepare(
        self,
        tensors: Sequence[NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]],
        *,
        op: str = "sum",
        coding: CodecSpec | None = None,
        algorithm: str = "auto",
        seed: int = 0,
        judged: bool = True,
    ) -> Callable[[], int]: ...
    def broadcast(self, array: NDArray[Any], *, root: int) -> None: ...
    def measure(
        self,
        codecs: Sequence[CodecSpec],
        *,
        untried: Sequence[CodecSpec] = (),
        ranks_per_node: int = 1,
    ) -> Machine: ...
    def allgatherv(
        self, source: NDArray[Any], target: NDArray[Any], *, counts: Sequence[int]
    ) -> None: ...
    def alltoallv(
        self,
        source: NDArray[Any],
        send_counts: Sequence[int],
        target: NDArray[Any],
        receive_counts: Sequence[int],
    ) -> None: ...
    def reducescatter(
        self,
        source: NDArray[Any],
        target: NDArray[Any],
        *,
        counts: Sequence[int],
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        dtype: str = "",
    ) -> bool: ...
    def barrier(self) -> None: ...
    def subset(self, ranks: Sequence[int]) -> Communicator: ...
    def watch(self, peers: Sequence[tuple[int, int, str]], grace_s: float) -> None: ...
    def close(self) -> None: ...
    def bytes_sent(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class Handle:
    """An operation in flight.

    Every operation takes ``keep``: an object that owns the memory that it reads and writes. The
    core references it until the operation is done, even if the handle is dropped, and permanently
    if the job was lost, because MPI may then still write to the memory.
    """

    def done(self) -> bool: ...
    def lost(self) -> bool: ...
    def wait(self) -> None: ...
    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once: on the engine's thread, or immediately if already done.

        It blocks the engine, so it must be short and must not wait for an operation.
        """
    def output(self) -> NDArray[np.uint8]:
        """Return the result of an allgather, alltoall or reducescatter, as bytes.

        The memory is aligned to 64 bytes and lives as long as the array.

        Raises (like the methods below):
            UsageError: the operation is still in flight.
            HorovodInternalError: it has failed.
        """
    def copy_output(self, address: int, stream: int) -> None:
        """Copy the result of a tensor on a device to memory of that device, in stream order.

        Waits until the copy is done.
        """
    def shape(self) -> list[int]:
        """Return the shape of the output."""
    def sizes(self) -> list[int]:
        """Return the number of rows from each rank, for an allgather or an alltoall."""
    def result(self) -> int:
        """Return the integer result of an operation that has one, such as join."""

class Coding:
    """The coding of one tensor."""

    def __init__(
        self,
        spec: CodecSpec,
        *,
        auto_bits: bool = False,
        auto_code: bool = False,
        error_feedback: bool = False,
        nmse_budget: float = 0.0,
    ) -> None: ...
    @property
    def spec(self) -> CodecSpec: ...
    @property
    def auto_bits(self) -> bool:
        """Whether the planner may use fewer bits or no compression instead of the spec's 8 bits."""
    @property
    def auto_code(self) -> bool:
        """Whether the planner may also use codes that lose less with as many bits."""
    @property
    def error_feedback(self) -> bool: ...
    @property
    def nmse_budget(self) -> float:
        """Largest relative squared error; 0: no limit."""

class Group:
    """Operations that become ready, and complete or fail, together."""

    def __init__(self, name: str, size: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...

class OperationFields(TypedDict, total=False):
    """Fields of an operation other than its kind; see csrc/engine/operation.h."""

    dtype: str
    shape: Sequence[int]
    root: int
    splits: Sequence[int]
    ranks: Sequence[int]
    group: Group | None
    prescale: float
    postscale: float
    coding: Coding | None
    lasting: bool
    check_finite: bool
    on_device: bool

class Operation:
    """The description of an operation on one tensor, equal on all ranks."""

    def __init__(
        self,
        *,
        kind: str,
        name: str = "",
        process_set: int = 0,
        op: str = "sum",
        **fields: Unpack[OperationFields],
    ) -> None: ...
    def replaced(self, **fields: Any) -> Operation:
        """Return the operation with other values of some fields."""
    def text(self) -> bytes:
        """Return the operation as text without commas or spaces, for a framework's graph."""
    @staticmethod
    def of_text(text: bytes) -> Operation: ...
    def __getattr__(self, field: str) -> Any: ...

class Engine:
    """The engine of a rank."""

    @staticmethod
    def over_mpi(
        facts: MpiFacts, config: EngineConfig, node: NodeFacts | None = None
    ) -> Engine: ...
    @staticmethod
    def over_threads(
        world: ThreadWorld, rank: int, config: EngineConfig, ranks_per_node: int | None = None
    ) -> Engine: ...
    def start(
        self,
        operation: Operation,
        source: int = 0,
        target: int = 0,
        keep: object = None,
        now: bool = False,
        device: int = -1,
        stream: int = 0,
    ) -> Handle:
        """Start an operation on the memory at two addresses.

        An operation without a name is numbered; ranks must then call in the same order. With
        ``now``, the caller is going to wait immediately: its thread executes the operation itself
        if possible, and the handle is usually done on return.

        ``device`` is the number of the device of both addresses, -1: the host. The source is ready
        after the work queued in ``stream`` so far. When the handle is done, the device's work is
        complete.
        """
    def start_all(
        self, operations: Sequence[tuple[Operation, int, int, object, int, int]]
    ) -> list[Handle]:
        """Start several operations: (operation, source, target, keep, device, stream) each."""
    def watch(self, peers: Sequence[tuple[int, int, str]], grace_s: float) -> None: ...
    def start_timeline(
        self, path: str, mark_cycles: bool = False, zero_s: float | None = None
    ) -> None: ...
    def stop_timeline(self) -> None: ...
    def shutdown(self, reason: str, patience_s: float = 1e9) -> None: ...
    def abort(self, message: str) -> None: ...
    def aborted(self) -> str: ...
    def joins(self) -> int:
        """Return how often this rank has joined."""
    def tune(
        self,
        *,
        fusion_bytes: int | None = None,
        cycle_time_s: float | None = None,
        algorithm: str | None = None,
        bits: int | None = None,
        segment_elements: int | None = None,
    ) -> None:
        """Change settings of later operations on all ranks; call it on rank 0.

        Args:
            fusion_bytes: largest number of bytes in one fused reduction.
            cycle_time_s: seconds that rank 0 waits for more tensors to fuse.
            algorithm: algorithm of exact or of compressed reductions; "auto" for the others.
            bits: 2, 4 or 8 bits per element, for codes with a choice; 32: no compression.
            segment_elements: elements per message of compressed reductions, a power of two; 0:
                2^18.

        Raises:
            UsageError: called on another rank, or a value that is not supported here.
        """
    def machine(self) -> Machine | None: ...
    def stats(self) -> dict[str, float]: ...
    def step_profile(self) -> dict[str, Any]:
        """Return the times and bytes of this rank in each of the latest finished steps."""
    def quality(self) -> dict[str, dict[str, Any]]: ...
    def owed_counts(self, process_set: int = 0) -> dict[str, int]: ...
    def owed_share(self, name: str, process_set: int = 0) -> NDArray[np.float32]: ...
    def restore_owed(
        self, owed: Mapping[str, NDArray[np.float32]], process_set: int = 0
    ) -> None: ...
    def forget_owed(self, names: list[str]) -> None: ...
    def coded_steps(self) -> dict[str, int]: ...
    def restore_coded_steps(self, steps: Mapping[str, int]) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class Machine:
    def __init__(
        self,
        *,
        ranks: int,
        ranks_per_node: int = 1,
        exact: str = "direct",
        coded: str = "sra",
        within: tuple[float, float] = (0.0, 0.0),
        across: tuple[float, float] = (0.0, 0.0),
        shared: tuple[float, float] = (0.0, 0.0),
        add_s_per_byte: float = 0.0,
        codecs: Sequence[tuple[CodecSpec, float, float, float]] = (),
        observed: Sequence[tuple[str, CodecSpec | None, int, float]] = (),
    ) -> None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def exact(self) -> str: ...
    @property
    def coded(self) -> str: ...
    @property
    def within(self) -> tuple[float, float]: ...
    @property
    def across(self) -> tuple[float, float]: ...
    @property
    def shared(self) -> tuple[float, float]: ...
    @property
    def link(self) -> tuple[float, float]: ...
    @property
    def add_s_per_byte(self) -> float: ...
    @property
    def codecs(self) -> list[tuple[CodecSpec, float, float, float]]: ...
    @property
    def observed(self) -> list[tuple[str, CodecSpec | None, int, float]]: ...
    def known(self, *, compressed: bool) -> list[str]: ...

class Plan:
    @property
    def algorithm(self) -> str: ...
    @property
    def spec(self) -> CodecSpec | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exact_seconds(self) -> float: ...
    @property
    def reason(self) -> str: ...

def plan(
    machine: Machine,
    *,
    count: int,
    codecs: Sequence[CodecSpec],
    exact: str = "auto",
    coded: str = "auto",
    any_algorithm: bool = False,
    worth: float = 0.05,
) -> Plan: ...
def usual_codes() -> list[CodecSpec]: ...
def rotated_codes() -> list[CodecSpec]: ...
def open_codes(spec: CodecSpec, *, any_code: bool) -> list[CodecSpec]: ...
def plan_threshold(machine: Machine, spec: CodecSpec) -> int | None: ...
def allreduce_s(
    machine: Machine, *, algorithm: str, count: int, coding: CodecSpec | None = None
) -> float: ...
def wire_bytes(
    machine: Machine, *, algorithm: str, count: int, coding: CodecSpec | None = None
) -> float: ...
def encode(
    x: NDArray[Any],
    *,
    spec: CodecSpec,
    seed: int = 0,
    tensor: int = 0,
    step: int = 0,
    rank: int = 0,
    dtype: str = "",
    generator: str = "ars",
) -> NDArray[np.uint8]: ...
def encode_into(
    x: NDArray[Any],
    message: NDArray[np.uint8],
    *,
    spec: CodecSpec,
    seed: int = 0,
    tensor: int = 0,
    step: int = 0,
    rank: int = 0,
    dtype: str = "",
    generator: str = "ars",
    threads: int = 1,
    by: float = 1.0,
    left: NDArray[np.float32] | None = None,
) -> bool: ...
def decode(message: NDArray[np.uint8], *, count: int, spec: CodecSpec) -> NDArray[np.float32]: ...
def decode_into(
    message: NDArray[np.uint8],
    y: NDArray[Any],
    *,
    spec: CodecSpec,
    dtype: str = "",
    threads: int = 1,
) -> None: ...
def decode_add_into(
    message: NDArray[np.uint8], y: NDArray[np.float32], *, spec: CodecSpec, threads: int = 1
) -> None: ...
def max_abs(x: NDArray[np.float32]) -> float: ...
def add_into(y: NDArray[np.float32], x: NDArray[np.float32]) -> None: ...
def noise(
    *,
    first_tile: int,
    tiles: int,
    seed: int = 0,
    tensor: int = 0,
    step: int = 0,
    rank: int = 0,
    generator: str = "ars",
) -> NDArray[np.uint16]: ...
def instruction_sets() -> list[str]: ...
def use_instruction_set(name: str) -> None: ...
def thread_allreduce(
    ranks: Sequence[Sequence[NDArray[Any]]],
    *,
    op: str = "sum",
    coding: CodecSpec | None = None,
    algorithm: str = "auto",
    seed: int = 0,
    ids: Sequence[int],
    step: int = 0,
    residuals: Sequence[Sequence[NDArray[np.float32]]] | None = None,
    owner_residuals: Sequence[Sequence[NDArray[np.float32]]] | None = None,
    threads: int = 1,
    segment: int = 0,
    dtype: str | None = None,
    codings: Sequence[CodecSpec] = (),
) -> list[dict[str, Any]]: ...

class Workers:
    def __init__(self, threads: int) -> None: ...

class BucketTensor:
    def __init__(
        self,
        *,
        at: int,
        count: int,
        id: int,
        spec: CodecSpec | None = None,
        residual: int = 0,
        owner_residual: int = 0,
    ) -> None: ...

def owned_elements(
    count: int, *, spec: CodecSpec, id: int, size: int, rank: int
) -> tuple[int, int]: ...

class BucketCoder:
    def __init__(
        self,
        tensors: Sequence[BucketTensor],
        *,
        dtype: str,
        seed: int,
        rank: int,
        size: int,
        limit: int = 0,
        workers: Workers,
    ) -> None: ...
    @property
    def waves(self) -> int: ...
    def bytes(self, wave: int, owner: int) -> int: ...
    def begin(self, bucket: int, steps: Sequence[int]) -> None: ...
    def encode(self, wave: int, messages: int) -> None: ...
    def reduce(self, wave: int, messages: int, result: int) -> None: ...
    def decode(self, wave: int, results: int, stride: int) -> None: ...
    def quality(self) -> tuple[float, float]: ...

def gpu_fault(library: str, device: int) -> str: ...
def gpu_platform(library: str) -> str: ...
def nccl_version(library: str) -> int: ...

class GpuBucket:
    stride: int
    def __init__(
        self,
        library: str,
        tensors: list[BucketTensor],
        *,
        dtype: str,
        seed: int,
        rank: int,
        size: int,
    ) -> None: ...
    def tables(
        self,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]: ...
    def encode(
        self,
        x: int,
        *,
        table: int,
        messages: int,
        step: int = 0,
        later: int = 0,
        nonfinite: int = 0,
        stream: int = 0,
    ) -> None: ...
    def reduce(
        self,
        x: int,
        *,
        table: int,
        messages: int,
        result: int,
        step: int = 0,
        later: int = 0,
        nonfinite: int = 0,
        stream: int = 0,
    ) -> None: ...
    def decode(
        self, results: int, *, table: int, out: int, nonfinite: int = 0, stream: int = 0
    ) -> None: ...

class GpuMessages:
    def __init__(
        self,
        library: str,
        places: Sequence[tuple[int, int, int, int]],
        *,
        spec: CodecSpec,
        dtype: str,
        seed: int,
    ) -> None: ...
    def table(self) -> NDArray[np.uint64]: ...
    def encode(
        self, x: int, *, table: int, messages: int, step: int, rank: int, stream: int = 0
    ) -> None: ...
    def decode(self, messages: int, *, table: int, out: int, stream: int = 0) -> None: ...
    def sum(
        self,
        x: int,
        *,
        table: int,
        messages: int,
        stride: int,
        ranks: int,
        own: int,
        factor: float,
        out: int,
        stream: int = 0,
    ) -> None: ...

def set_current_engine(engine: Engine | None) -> None: ...
def address_of(array: NDArray[Any]) -> int: ...
def foreign_table_address() -> int: ...
def set_calls_block(block: bool) -> None:
    """Set whether this thread waits for the operations that it starts through the table.

    Ranks that wait for each other so fail; others only warn.
    """

def xla_collective() -> Any: ...
def xla_device_collective(streams: bool) -> Any: ...
