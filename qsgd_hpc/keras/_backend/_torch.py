"""Keras on PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.frameworks.grouping import partition, wait_for_all
from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.frameworks.shared_names import claim_residual
from qsgd_hpc.keras._backend import Backend, F, Reducer, distinct_paths
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.torch.compression import Compression
from qsgd_hpc.torch.ops import allreduce
from qsgd_hpc.torch.prepared import GradientAllreduce, mark_step

__all__ = ["BACKEND"]


class _Torch(Backend):
    Compression = Compression

    def reducer(self, reduction: GradientReduction, groups: Any) -> Reducer:
        """Return a function that reduces gradients in place, after the backward pass."""
        prepared: dict[tuple[str, torch.Size, torch.dtype], GradientAllreduce] = {}
        job: Any = lambda: None  # noqa: E731

        def allreduce_of(name: str, v: Any, gradient: torch.Tensor) -> GradientAllreduce:
            key = name, gradient.shape, gradient.dtype
            made = prepared.get(key)
            if made is None:
                made = prepared[key] = GradientAllreduce(f"gradient.{name}", *key, reduction)
            claim_residual(f"gradient.{name}", v, made.coding, reduction.process_set)
            return made

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
            given = list(gradients)
            if reduction.alone:
                mark_step(given, f"gradient.{variables[0].path}" if variables else "gradient.")
                return given
            nonlocal job
            if job() is not basics.context():
                job = weakref.ref(basics.context())
                prepared.clear()
            places = {id(v): i for i, v in enumerate(variables)}
            names = distinct_paths(variables)
            handles = []
            for grouped, members in _calls(variables, groups):
                at = [places[id(v)] for v in members]
                group = ops.Group(f"group.{names[at[0]]}", len(at)) if grouped else None
                for i, v in zip(at, members, strict=True):
                    handles.append(allreduce_of(names[i], v, given[i]).start(given[i], group))
            nonfinite = wait_for_all(handles)
            if nonfinite is not None:
                raise nonfinite
            return given

        return reduce

    def uncompiled(self, function: F) -> F:
        return cast(F, _disable_dynamo(function))

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, with zeros for branches of the model that this rank did not use."""
        pairs = zip(gradients, variables, strict=True)
        return [torch.zeros_like(v.value) if g is None else g for g, v in pairs]

    def all_ranks_agree(self, yes: Any, name: str, reduction: GradientReduction) -> Any:
        mine = torch.as_tensor(yes).to(torch.uint8)
        return allreduce(mine, name=name, op=ops.Min, process_set=reduction.process_set).bool()


def _calls(variables: Sequence[Any], groups: Any) -> Iterator[tuple[bool, Sequence[Any]]]:
    """Yield the variables of each call, and whether they form a group."""
    known = {id(v) for v in variables}
    chosen = groups
    if not isinstance(groups, int):
        chosen = [[v for v in group if id(v) in known] for group in groups]
    grouped = partition(variables, chosen)
    for members in grouped:
        yield True, members
    taken = {id(v) for members in grouped for v in members}
    yield False, [v for v in variables if id(v) not in taken]


BACKEND = _Torch()
