"""Layout of the flat tensors that FSDP2 passes to its collectives, and of their messages.

A module's tensor contains the shards of its parameters in sequence, each as long as the
longest rank's, in FSDP2's order of the parameters: children first. In a message, the shards of
large parameters are coded, all others uncompressed.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qsgd_hpc import _core
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch.ops._tensors import name_of
from qsgd_hpc.torch.parameters import plain_name

__all__ = [
    "Part", "Piece", "before_first_gathering", "data_parallel_rank", "message_bytes",
    "param_groups", "parts_of", "pieces_of", "sharded_modules",
]  # fmt: skip

HEADER_BYTES = 32
ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Part:
    """One parameter, unsharded."""

    name: str
    shape: tuple[int, ...]
    dim: int
    """The dimension along which it is sharded."""
    owner: nn.Module | None = field(default=None, compare=False, repr=False)
    """The module that has it, if it may be frozen."""
    held: tuple[int, ...] | None = None
    """The shape that FSDP2 shards: with tensor parallelism only a part of ``shape``."""

    @property
    def trains(self) -> bool:
        """Return whether it requires a gradient."""
        if self.owner is None:
            return True
        parameter: torch.Tensor = getattr(self.owner, self.name.rpartition(".")[2])
        return parameter.requires_grad

    def elements(self, ranks: int) -> int:
        """Return the number of elements of each rank's shard, including padding."""
        held = self.shape if self.held is None else self.held
        if self.dim > 0:  # FSDP2 accepts this only if no padding is needed
            return math.prod(held) // ranks
        return -(-held[0] // ranks) * math.prod(held[1:])


def sharded_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that ``fully_shard`` was called on, by name.

    Each is an ``FSDPModule`` and an ``nn.Module``; there is no type for both.
    """
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def param_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 communicates for a module; torch has no name."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # PyTorch 2.9 has at most one
        several = filter(None, [state._fsdp_param_group])
    return list(several)


def before_first_gathering(module: Any, act: Callable[[Any], None]) -> None:
    """Call ``act(module)`` before FSDP2 first gathers weights, if the module is the outermost one.

    With one rank, nothing is sent, and ``act`` is not called.

    A forward_pre_hook would not run in other methods (``register_fsdp_forward_method``), and torch
    would trace it in a compiled model. Of several calls for one module, the last acts first.
    """
    state = module._get_fsdp_state()
    begin = state._lazy_init

    @functools.wraps(begin)
    def beginning() -> None:
        # The modules in the outermost one know by now that they are not it.
        if state._is_root is None and dist.get_world_size() > 1:
            act(module)
        begin()

    state._lazy_init = beginning


def data_parallel_rank(module: Any) -> int:
    """Return this rank's number among those that average an FSDPModule's gradients."""
    for group in param_groups(module):
        mesh = group.mesh_info
        replica: int = getattr(mesh, "replicate_mesh_rank", 0)
        return int(replica * mesh.shard_mesh_size + mesh.shard_mesh_rank)
    return 0  # the module has no parameters of its own


def parts_of(module: Any, names: Mapping[nn.Module, str]) -> tuple[Part, ...]:
    """Return the parameters that FSDP2 packs together with a module's, in its order.

    They may belong to several modules, if ``fully_shard`` was called on a list of them.

    Args:
        module: an FSDPModule.
        names: the names of all modules of the model.
    """
    found = []
    for group in param_groups(module):
        for each in group.fsdp_params:
            owner, key = each._module_info.module, each._module_info.param_name
            name = plain_name(f"{names.get(owner, '')}.{key}".lstrip("."))
            shape, held = tuple(each.sharded_param.shape), tuple(each._orig_size)
            found.append(Part(name, shape, each.fsdp_placement.dim, owner, held))
    return tuple(found)


@dataclass(frozen=True)
class Piece:
    """A parameter's shard; ``spec`` is None for one that is sent uncompressed."""

    elements: slice
    """Range in the shard."""
    bytes: slice
    """Range in the message."""
    id: int
    spec: _core.CodecSpec | None

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return int(self.elements.stop - self.elements.start)


def pieces_of(
    parts: Sequence[Part],
    module: str,
    compression: Lossy,
    elements: int,
    ranks: int,
    dtype: torch.dtype,
) -> list[Piece]:
    """Return the pieces of a shard, in order.

    Args:
        parts: the parameters that FSDP2 may have packed; if they do not fill the shard (some had
            no gradient in this step), the shard is one parameter named ``module``.
        compression: chooses each parameter's code by its name and unsharded shape.
        elements: number of elements of a shard, including padding.
        ranks: number of ranks over which the module is sharded.
    """
    if sum(part.elements(ranks) for part in parts) != elements:
        parts = [Part(module, (ranks, elements), 0)]
    pieces: list[Piece] = []
    at = filled = 0
    for part in parts:
        count = part.elements(ranks)
        coding = compression.coding_for_gradient(part.name, part.shape, name_of(dtype))
        spec = None if coding is None else coding.spec
        size = count * dtype.itemsize if spec is None else HEADER_BYTES + spec.bytes(count)
        id_ = zlib.crc32(part.name.encode())
        pieces.append(Piece(slice(at, at + count), slice(filled, filled + size), id_, spec))
        at += count
        filled += _aligned(size)
    return pieces


def message_bytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a message, the same on every rank."""
    return _aligned(pieces[-1].bytes.stop) if pieces else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
