"""One call of a collective on some arrays, whether now or whenever a compiled program runs."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax

from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, require_member

__all__ = ["Collective", "Shape", "is_traced", "named", "refuse_traced"]

Shape = tuple[int, ...]
Arrays = Sequence[Any]
Self = TypeVar("Self", bound="Collective")

_TANGENT = ".tangent"


def is_traced(arrays: Arrays) -> bool:
    """Tell whether JAX is tracing a function that these arrays stand for arguments of."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def refuse_traced(arrays: Arrays, function: str) -> None:
    """Raise where a handle would have to leave a traced function.

    Raises:
        UsageError: inside ``jax.jit``, ``jax.grad`` and their like.
    """
    if is_traced(arrays):
        raise UsageError(
            f"{function}_async inside a function that JAX traces (jit, grad, ...): there is "
            f"nothing to wait for there; call hvd.{function}, which such a program carries out "
            "beside its other work"
        )


def named(
    kind: str, name: str | None, process_set: ProcessSet, arrays: Arrays, *, grouped: bool = False
) -> dict[str, Any]:
    """Return what every call is made of: the names of its operations, who takes part, the group.

    Unnamed calls in traced functions are numbered apart from those that are made now: a rank that
    traces a function once more than others then disturbs no more than that function.
    """
    if is_traced(arrays) and not name:
        text = "traced." + ops.label(f"traced.{kind}", None, process_set)
    else:
        text = ops.label(kind, name, process_set)
    names = tuple(ops.member_names(text, len(arrays))) if grouped else (text,)
    return {"names": names, "process_set": process_set, "group": text if grouped else None}


@dataclass(frozen=True)
class Collective(ABC):
    """One call; its fields are plain values, because compiled programs are kept by them.

    What a rank's result depends on lies on all ranks, so the derivative of a collective is a
    collective; docs/horovod.md has the formulae of reverse mode. It has a name of its own, so it
    does not matter in which order the ranks come to it. It forms no group, because a script may
    differentiate the results of one apart.
    """

    names: tuple[str, ...]
    """Of its operations, one per array."""
    process_set: ProcessSet
    group: str | None
    """The name under which they complete or fail together."""

    kind: ClassVar[str]
    """As the core calls it."""
    has_rows: ClassVar[bool] = False
    """Whether it deals with the first dimension apart from the others."""

    @property
    def in_place(self) -> bool:
        """Whether a compiled program puts results where the arguments were."""
        return False

    def start(self, arrays: Arrays) -> Handle:
        """Start it on concrete arrays; the result is the list of those that it makes."""
        return Handle.together([self.start_one(i, array) for i, array in enumerate(arrays)])

    @abstractmethod
    def start_one(self, index: int, array: Any) -> Handle:
        """Start it on one of its arrays; the result is a new one."""

    def result_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of what it makes of arrays of these shapes."""
        return list(shapes)

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return what the core must know of an array beside what all kinds have."""
        return {}

    @abstractmethod
    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return the gradients of this rank's arrays (of linear ones)."""

    def derivative(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> Arrays:
        """Return how the results change when what goes in changes by the tangents."""
        from qsgd_hpc.jax.ops._primitive import run

        return run(self.renamed(_TANGENT), tangents)

    def rows(self, index: int, shape: Shape) -> Shape:
        """Return how many rows each rank sends, where the result's shape depends on that."""
        return ()

    def splits(self, shape: Shape) -> Shape:
        """Return how many rows this rank sends each."""
        return ()

    def for_batches(self: Self) -> Self:
        """Return the call for arrays that have one more dimension, of ``jax.vmap``."""
        return self

    def core_group(self) -> ops.Group | None:
        """Return what the core is told of the group."""
        return ops.Group(self.group, len(self.names)) if self.group else None

    def renamed(self: Self, suffix: str) -> Self:
        """Return this call under other names."""
        return replace(self, names=tuple(name + suffix for name in self.names))

    def turned_names(self) -> dict[str, Any]:
        """Return the names for the transposed call."""

        def turn(name: str) -> str:
            return name.removesuffix(_TANGENT) + ".gradient"

        return {
            "names": tuple(map(turn, self.names)),
            "process_set": self.process_set,
            "group": None,
        }

    def picked(self: Self, indices: Sequence[int]) -> Self:
        """Return this call for some of its arrays, each by itself."""
        return replace(self, names=tuple(self.names[i] for i in indices), group=None)

    def encoded(self, avals: Sequence[Any]) -> str:
        """Return the call as the core reads it from a compiled program; see csrc/jax."""
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
