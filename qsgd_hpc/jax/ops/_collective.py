"""Calls of collectives on arrays, and the JAX primitive that executes or compiles them."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import qsgd_hpc._core as _core
from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jax.ops._arrays import with_int64
from qsgd_hpc.runtime import basics, gpu, ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, require_member

__all__ = [
    "TANGENT", "Collective", "Shape", "blocks_programs", "first", "is_traced", "named",
    "refuse_traced", "run",
]  # fmt: skip

Shape = tuple[int, ...]
Arrays = Sequence[Any]
Self = TypeVar("Self", bound="Collective")

TANGENT = ".tangent"
"""Suffix of the names of the derivative by tangents."""


def is_traced(arrays: Arrays) -> bool:
    """Return whether these arrays are arguments of a function that JAX is tracing."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def blocks_programs() -> bool:
    """Return whether a compiled program does nothing else during a collective."""
    return gpu.served() == "cpu" or (gpu.served() == "cuda" and jax.default_backend() == "gpu")


def refuse_traced(arrays: Arrays, function: str) -> None:
    """Raise if a handle would leave a traced function.

    Raises:
        UsageError: inside ``jax.jit``, ``jax.grad`` and similar transformations.
    """
    if is_traced(arrays):
        raise UsageError(
            f"{function}_async inside a function that JAX traces (jit, grad, ...): asynchronous "
            f"calls are not possible there; call hvd.{function}, which a compiled program "
            "overlaps with other work"
        )


def named(
    kind: str, name: str | None, process_set: ProcessSet, arrays: Arrays, *, grouped: bool = False
) -> dict[str, Any]:
    """Return the common parts of a call: the names of its operations, the process set, the group.

    Unnamed calls in traced functions are numbered separately from immediate ones, so that a rank
    that traces a function more often than others affects only that function.
    """
    require_member(process_set)
    if is_traced(arrays) and not name:
        text = "traced." + ops.label(f"traced.{kind}", None, process_set)
    else:
        text = ops.label(kind, name, process_set)
    names = tuple(ops.member_names(text, len(arrays))) if grouped else (text,)
    return {"names": names, "process_set": process_set, "group": text if grouped else None}


@dataclass(frozen=True)
class Collective(ABC):
    """One call; its fields are plain values, because they are the key of compiled programs.

    A rank's result depends on all ranks' arrays, so the derivative of a collective is a collective;
    docs/horovod.md has the formulae of reverse mode. It has a separate name, so the order in which
    the ranks call it does not matter. It forms no group, because a script may differentiate the
    results separately.
    """

    names: tuple[str, ...]
    """Names of its operations, one per array."""
    process_set: ProcessSet
    group: str | None
    """Name of the group whose operations complete or fail together, or None."""

    kind: ClassVar[str]
    """Name of the operation in the core."""
    has_rows: ClassVar[bool] = False
    """Whether the first dimension has a special role."""

    @property
    def in_place(self) -> bool:
        """Whether a compiled program writes results to the memory of the arguments."""
        return False

    def start(self, arrays: Arrays) -> Handle:
        """Start the operation on concrete arrays; its result is the list of new arrays."""
        return Handle.together([self.start_one(i, array) for i, array in enumerate(arrays)])

    @abstractmethod
    def start_one(self, index: int, array: Any) -> Handle:
        """Start the operation on one of its arrays; its result is a new array."""

    def result_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of the results for arrays of these shapes."""
        return list(shapes)

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the fields of the core's operation that are specific to this kind."""
        return {}

    @abstractmethod
    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return the gradients of this rank's arrays (for linear operations)."""

    def derivative(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> Arrays:
        """Return the change of the results for tangents of the arguments."""
        return run(replace(self, **self.derived(TANGENT)), tangents)

    def is_widened(self, dtype: Any) -> bool:
        """Return whether elements are sent as int64."""
        return False

    def rows(self, index: int, shape: Shape) -> Shape:
        """Return the number of rows of each rank, if the result's shape depends on it."""
        return ()

    def splits(self, shape: Shape) -> Shape:
        """Return the number of rows that this rank sends to each."""
        return ()

    def for_batches(self: Self) -> Self:
        """Return the call for arrays with one more dimension, for ``jax.vmap``."""
        return self

    def core_group(self) -> ops.Group | None:
        """Return the core's description of the group."""
        return ops.Group(self.group, len(self.names)) if self.group else None

    def derived(self, suffix: str) -> dict[str, Any]:
        """Return the names, process set and group of a call that is derived from this one."""
        names = tuple(name + suffix for name in self.names)
        return {"names": names, "process_set": self.process_set, "group": None}

    def transposed_names(self) -> dict[str, Any]:
        """Return the names, process set and group of the transposed call."""
        names = tuple(name.removesuffix(TANGENT) + ".gradient" for name in self.names)
        return {**self.derived(""), "names": names}

    def picked(self: Self, indices: Sequence[int]) -> Self:
        """Return this call for some of its arrays, without a group."""
        return replace(self, names=tuple(self.names[i] for i in indices), group=None)

    def encoded(self, avals: Sequence[Any]) -> str:
        """Return the call, serialised as hexadecimal text for compiled programs; see csrc/jax."""
        content = struct.pack("=iiI", basics.rank(), basics.size(), len(avals))
        process_set = require_member(self.process_set)
        for index, (name, aval) in enumerate(zip(self.names, avals, strict=True)):
            shape = tuple(aval.shape)
            operation = Operation(
                kind=self.kind,
                name=f"{self.kind}.{name}",
                process_set=process_set,
                group=self.core_group(),
                **self.fields(index, shape, aval.dtype),
            )
            text = operation.text()
            content += struct.pack("=I", len(text)) + text
            content += _list(self.rows(index, shape)) + _list(self.splits(shape))
        return content.hex()


def _list(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"=I{len(numbers)}q", len(numbers), *numbers)


_TARGET = "qsgd_hpc_collective"
_ON_DEVICE = "qsgd_hpc_collective_on_device"

_collective: Any = Primitive("qsgd_hpc_collective")
_collective.multiple_results = True


first: Callable[[list[jax.Array]], jax.Array] = itemgetter(0)


def run(call: Collective, arrays: Sequence[Any]) -> list[Any]:
    """Execute a collective, or add it to the program that is being traced."""
    results: list[Any] = _collective.bind(*arrays, call=call) if arrays else []
    return results


def _now(*arrays: Any, call: Collective) -> list[jax.Array]:
    made: list[jax.Array] = call.start(arrays).wait()
    return made


def _abstract(*avals: Any, call: Collective) -> list[Any]:
    shapes = call.result_shapes([tuple(aval.shape) for aval in avals])
    return [
        jax.core.ShapedArray(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)
    ]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Collective) -> Any:
    outputs = run(call, primals)
    nonzero = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    changes = [_no_change(output) for output in outputs]
    if nonzero:
        inputs, results = [primals[i] for i in nonzero], [outputs[i] for i in nonzero]
        made = call.picked(nonzero).derivative(inputs, results, [tangents[i] for i in nonzero])
        for i, change in zip(nonzero, made, strict=True):
            changes[i] = change
    return outputs, changes


def _no_change(output: Any) -> Any:
    dtype = output.dtype if jnp.issubdtype(output.dtype, jnp.inexact) else jax.dtypes.float0
    return ad.Zero(jax.core.ShapedArray(output.shape, dtype))


def _transpose(cotangents: Sequence[Any], *arguments: Any, call: Collective) -> Any:
    instantiate: Any = ad.instantiate_zeros
    return call.transposed([instantiate(cotangent) for cotangent in cotangents])


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Collective) -> Any:
    """Execute a batch of calls as one, along an axis that the collective does not use."""
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    axis = 1 if call.has_rows else 0
    together = [
        jnp.stack([array] * size, axis) if dim is None else jnp.moveaxis(array, dim, axis)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    return run(call.for_batches(), together), [axis] * len(together)


def _lower(context: Any, *operands: Any, call: Collective, target: str = _TARGET) -> Any:
    _refuse_several_devices(context, call)
    aliases = {i: i for i in range(len(operands))} if call.in_place else None
    # Without a side effect, XLA would merge two calls with the same operands.
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases, has_side_effect=True)
    return rule(context, *operands, call=call.encoded(context.avals_in))


def _lower_on_device(context: Any, *operands: Any, call: Collective) -> Any:
    """Lower for buffers in device memory; JAX widens integers, as the core does not do it there."""
    if not any(call.is_widened(aval.dtype) for aval in context.avals_in):
        return _lower(context, *operands, call=call, target=_ON_DEVICE)
    with with_int64():
        return mlir.lower_fun(_widened, multiple_results=True)(context, *operands, call=call)


def _widened(*arrays: Any, call: Collective) -> list[Any]:
    wide = [a.astype("int64") if call.is_widened(a.dtype) else a for a in arrays]
    return [x.astype(a.dtype) for x, a in zip(run(call, wide), arrays, strict=True)]


def _lower_for(served: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering for a platform, on which the kernels serve buffers or do not."""

    def lower(context: Any, *operands: Any, call: Collective) -> Any:
        chosen = _lower_on_device if gpu.served() == served else otherwise
        return chosen(context, *operands, call=call)

    return lower


def _refuse_several_devices(context: Any, call: Collective) -> None:
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    devices = mesh.size if mesh is not None else getattr(axes, "num_devices", 1)
    if devices > 1:
        raise UsageError(
            f"{call.kind} of {call.names[0]!r} in a program for {devices} devices (pmap, "
            "shard_map or sharded arguments): a rank must use one device; start one rank per "
            "device (qsgd-hpc run -np N), each with arrays on its own device"
        )


def _refuse_platform(context: Any, *operands: Any, call: Collective) -> Any:
    raise UsageError(
        f"{call.kind} of {call.names[0]!r} in a program for "
        f"{', '.join(context.module_context.platforms)}: collectives can be compiled for CPUs, and "
        "for GPUs where qsgd-hpc has kernels (qsgd-hpc doctor); call them outside jax.jit, where "
        "arrays of any device are sent through the host, or set JAX_PLATFORMS=cpu"
    )


_collective.def_impl(_now)
_collective.def_abstract_eval(_abstract)
ad.primitive_jvps[_collective] = _jvp
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch
mlir.register_lowering(_collective, _refuse_platform)
# The kernels' twin treats host memory as device memory.
mlir.register_lowering(_collective, _lower_for("cpu", _lower), platform="cpu")
jax.ffi.register_ffi_target(_TARGET, _core.xla_collective(), platform="cpu")
jax.ffi.register_ffi_target(_ON_DEVICE, _core.xla_device_collective(streams=False), platform="cpu")
for _platform in ("cuda", "rocm"):
    _on_gpu = _lower_for("cuda", _refuse_platform)
    mlir.register_lowering(_collective, _on_gpu, platform=_platform)
    jax.ffi.register_ffi_target(
        _ON_DEVICE, _core.xla_device_collective(streams=True), platform=_platform.upper()
    )
