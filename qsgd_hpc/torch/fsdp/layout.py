"""Layout of the flat tensors that FSDP2 passes to its collectives.

A module's tensor contains the shards of its parameters in sequence, each as long as the
longest rank's, in FSDP2's order of the parameters: children first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

__all__ = ["Part", "data_parallel_rank", "parts_of", "sharded_modules"]


@dataclass(frozen=True)
class Part:
    """One parameter, unsharded."""

    name: str
    shape: tuple[int, ...]
    dim: int
    """The dimension along which it is sharded."""
    owner: nn.Module | None = field(default=None, compare=False, repr=False)
    """The module that has it, if it may be frozen."""

    @property
    def trains(self) -> bool:
        """Return whether it requires a gradient."""
        if self.owner is None:
            return True
        parameter: torch.Tensor = getattr(self.owner, self.name.rpartition(".")[2])
        return parameter.requires_grad

    def elements(self, ranks: int) -> int:
        """Return the number of elements of each rank's shard, including padding."""
        if self.dim > 0:  # FSDP2 accepts this only if no padding is needed
            return math.prod(self.shape) // ranks
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


def sharded_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that ``fully_shard`` was called on, by name.

    Each is an ``FSDPModule`` and an ``nn.Module``; there is no type for both.
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def data_parallel_rank(module: Any) -> int:
    """Return this rank's number among those that average an FSDPModule's gradients."""
    for group in module._get_fsdp_state()._fsdp_param_groups:  # no public name
        mesh = group.mesh_info
        replica: int = getattr(mesh, "replicate_mesh_rank", 0)
        return int(replica * mesh.shard_mesh_size + mesh.shard_mesh_rank)
    return 0  # the module has no parameters of its own


def parts_of(module: nn.Module, name: str = "") -> tuple[Part, ...]:
    """Return the parameters of an FSDPModule in order, without those of nested FSDPModules.

    Args:
        module: a module whose parameters are currently sharded, as between two steps.
        name: name of the module, the prefix of the parts' names.
    """
    found: dict[nn.Parameter, Part] = {}
    for prefix, owner in _children_first(module, name, set()):
        for key, parameter in owner.named_parameters(recurse=False):
            dim = _sharded_dim(parameter)
            if dim is not None and parameter not in found:
                full_name = f"{prefix}.{key}".lstrip(".")
                found[parameter] = Part(full_name, tuple(parameter.shape), dim, owner)
    return tuple(found.values())


def _children_first(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    for name, child in module.named_children():
        if child not in seen and not isinstance(child, FSDPModule):
            yield from _children_first(child, f"{prefix}.{name}".lstrip("."), seen)
    yield prefix, module


def _sharded_dim(parameter: nn.Parameter) -> int | None:
    if not isinstance(parameter, DTensor):  # ignored_params of fully_shard
        return None
    return next((p.dim for p in parameter.placements if isinstance(p, Shard)), None)
