"""The JAX primitive behind every collective: how it is carried out, compiled and transformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import qsgd_hpc._core as _core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jax.ops._collective import Collective

__all__ = ["run"]

_TARGET = "qsgd_hpc_collective"

_collective: Any = Primitive("qsgd_hpc_collective")
_collective.multiple_results = True


def run(call: Collective, arrays: Sequence[Any]) -> list[Any]:
    """Carry out a collective now, or make it part of the program that is being traced."""
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
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    changes = [_no_change(output) for output in outputs]
    if moving:
        inputs, results = [primals[i] for i in moving], [outputs[i] for i in moving]
        made = call.picked(moving).derivative(inputs, results, [tangents[i] for i in moving])
        for i, change in zip(moving, made, strict=True):
            changes[i] = change
    return outputs, changes


def _no_change(output: Any) -> Any:
    dtype = output.dtype if jnp.issubdtype(output.dtype, jnp.inexact) else jax.dtypes.float0
    return ad.Zero(jax.core.ShapedArray(output.shape, dtype))


def _transpose(cotangents: Sequence[Any], *arguments: Any, call: Collective) -> Any:
    instantiate: Any = ad.instantiate_zeros
    return call.transposed([instantiate(cotangent) for cotangent in cotangents])


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Collective) -> Any:
    """Carry out a batch of calls as one, along an axis that the collective leaves alone."""
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    axis = 1 if call.has_rows else 0
    together = [
        jnp.stack([array] * size, axis) if dim is None else jnp.moveaxis(array, dim, axis)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    return run(call.for_batches(), together), [axis] * len(together)


def _lower(context: Any, *operands: Any, call: Collective) -> Any:
    _refuse_several_devices(context, call)
    aliases = {i: i for i in range(len(operands))} if call.in_place else None
    # XLA would otherwise take two calls with the same operands for one.
    rule = jax.ffi.ffi_lowering(_TARGET, operand_output_aliases=aliases, has_side_effect=True)
    return rule(context, *operands, call=call.encoded(context.avals_in))


def _refuse_several_devices(context: Any, call: Collective) -> None:
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    devices = mesh.size if mesh is not None else getattr(axes, "num_devices", 1)
    if devices > 1:
        raise UsageError(
            f"{call.kind} of {call.names[0]!r} in a program for {devices} devices (pmap, "
            "shard_map or sharded arguments): a rank has one device here; start a rank per device "
            "(qsgd-hpc run -np N) and leave the arrays of each on its own"
        )


def _refuse_platform(context: Any, *operands: Any, call: Collective) -> Any:
    raise UsageError(
        f"{call.kind} of {call.names[0]!r} in a program for "
        f"{', '.join(context.module_context.platforms)}: collectives can be compiled for CPUs "
        "alone; call them outside jax.jit, where arrays of any device travel through the host, or "
        "set JAX_PLATFORMS=cpu"
    )


_collective.def_impl(_now)
_collective.def_abstract_eval(_abstract)
ad.primitive_jvps[_collective] = _jvp
ad.primitive_transposes[_collective] = _transpose
batching.primitive_batchers[_collective] = _batch
mlir.register_lowering(_collective, _refuse_platform)
mlir.register_lowering(_collective, _lower, platform="cpu")
jax.ffi.register_ffi_target(_TARGET, _core.xla_collective(), platform="cpu")
