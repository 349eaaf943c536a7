"""Compressed gradients and weights for FSDP2, with one additional line in the script.

::

    quantize_fsdp(model, gradient_bits=4, weight_bits=8)

Needs torch.distributed and the compiled core, but neither MPI nor ``hvd.init()``. See docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from qsgd_hpc import env
from qsgd_hpc.compression import Eden, Lossy, Qsgd
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import Rule, as_rules

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _  # noqa: F401
except ImportError:
    raise UsageError(
        f"compression with FSDP2 needs PyTorch 2.9 or newer, whose collectives can be replaced; "
        f"this is {torch.__version__}. With DDP, any PyTorch from 2.4 on compresses."
    ) from None

from qsgd_hpc.torch.fsdp.collectives import QSGDAllGather, QSGDReduceScatter, ShardedModule
from qsgd_hpc.torch.fsdp.layout import data_parallel_rank, param_groups, parts_of, sharded_modules

__all__ = ["QuantizedShards", "quantize_fsdp"]

SCHEMES: Mapping[str, type[Qsgd | Eden]] = {"qsgd": Qsgd, "eden": Eden}

Rules = str | Iterable[Rule | tuple[str, int | str]]


class QuantizedShards:
    """The state of :func:`quantize_fsdp`: traffic, and the position in the noise."""

    def __init__(
        self,
        modules: Mapping[str, ShardedModule],
        gradients: Sequence[QSGDReduceScatter],
        weights: Sequence[QSGDAllGather],
    ) -> None:
        self._modules, self._gradients, self._weights = modules, gradients, weights

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent.

        Returns:
            ``gradients`` and ``weights``, and the bytes without codes:
            ``gradients_uncoded`` and ``weights_uncoded``.
        """
        kinds = {"gradients": self._gradients, "weights": self._weights}
        counted = {kind: sum(c.traffic.sent for c in them) for kind, them in kinds.items()}
        return counted | {
            f"{kind}_uncoded": sum(c.traffic.uncoded for c in them) for kind, them in kinds.items()
        }

    def state_dict(self) -> dict[str, int]:
        """Return the step count of each module, so that the noise of a resumed run continues.

        Equal on all ranks, and valid for any number of ranks.
        """
        return {name: module.steps for name, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved step counts.

        Raises:
            UsageError: they are those of a model with other modules.
        """
        if state.keys() != self._modules.keys():
            odd = sorted(state.keys() ^ self._modules.keys())
            raise UsageError(
                f"quantize_fsdp: the saved state has other modules: {', '.join(map(repr, odd))} "
                "are only in the model or only in the state; call fully_shard on the same "
                "modules"
            )
        for name, steps in state.items():
            self._modules[name].steps = steps


def quantize_fsdp(
    model: nn.Module,
    gradient_bits: int | None = 4,
    weight_bits: int | None = 8,
    *,
    scheme: str = "qsgd",
    rules: Rules = (),
    weight_rules: Rules = (),
    seed: int | None = None,
    threads: int | None = None,
    **settings: Any,
) -> QuantizedShards:
    """Reduce the gradients and gather the weights of a model under FSDP2 as codes of few bits.

    Call it on every rank, after ``fully_shard`` and before the first step::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        quantize_fsdp(model, gradient_bits=4, weight_bits=8)

    The optimizer updates exact shards; it uses the gradient at the coded weights
    (QSDP: Markov et al., ICML 2023). Vectors and small parameters are sent uncompressed.

    Args:
        model: the model or a part of it; applies to every module within it that is under
            ``fully_shard``.
        gradient_bits: bits per element, including the sign: 2 to 8, with ``eden`` 1 to 8; None:
            gradients are not compressed. One bit of ``qsgd`` needs error feedback, which would need
            a float32 copy of the unsharded gradients on each rank; it is not supported.
        weight_bits: the same for weights.
        scheme: ``qsgd`` or ``eden``, for both.
        rules: bits of gradients by name or number of elements, as in
            ``"head*=8, *.embed=32"``.
        weight_rules: the same for weights.
        seed: seed of the rounding noise, equal on every rank; None uses QSGD_SEED.
        threads: number of threads that code a shard; None uses QSGD_THREADS.
        **settings: ``bucket_size`` and ``min_elements``, and for ``qsgd`` also ``norm`` and
            ``rounding``; for both. If unset, QSGD_* are used.
    Returns:
        an object that counts the bytes and holds the state for checkpoints.
    Raises:
        UsageError: a setting is out of range, or FSDP2 has sharded no module.
    """
    modules = sharded_modules(model)
    if not modules:
        raise UsageError(_no_module(model))
    gradients = _compression("gradient_bits", gradient_bits, scheme, rules, settings)
    weights = _compression("weight_bits", weight_bits, scheme, weight_rules, settings)
    seed = env.get("QSGD_SEED") if seed is None else seed
    threads = env.get("QSGD_THREADS") if threads is None else threads
    shared: dict[str, ShardedModule] = {}
    reductions, gatherings = [], []
    names = {module: name for name, module in model.named_modules()}
    by_state: dict[Any, ShardedModule] = {}
    for name, module in modules.items():
        state = module._get_fsdp_state()
        module._qsgd_quantized = True
        if state in by_state:  # fully_shard was called on a list of modules
            shared[name] = by_state[state]
            continue
        module.reshard()  # frozen parameters are recognised by the sharded ones
        rank = data_parallel_rank(module)
        parts = parts_of(module, names)
        shards = max((g.mesh_info.shard_mesh_size for g in param_groups(module)), default=1)
        shared[name] = by_state[state] = ShardedModule(name, parts, rank, seed, threads, shards)
        reductions.append(QSGDReduceScatter(shared[name], gradients))
        module.set_custom_reduce_scatter(reductions[-1])
        gatherings.append(QSGDAllGather(shared[name], weights))
        module.set_custom_all_gather(gatherings[-1])
    return QuantizedShards(shared, reductions, gatherings)


def is_quantized(module: nn.Module) -> bool:
    """Return whether :func:`quantize_fsdp` was called on a module."""
    return hasattr(module, "_qsgd_quantized")


def _compression(
    what: str, bits: int | None, scheme: str, rules: Rules, settings: Mapping[str, Any]
) -> Lossy | None:
    if bits is None:
        return None
    if scheme not in SCHEMES:
        raise UsageError(f"quantize_fsdp(scheme={scheme!r}): choose {' or '.join(SCHEMES)}")
    given: dict[str, Any] = {**settings, "bits": bits}
    if rules:
        given["rules"] = rules
    try:
        compression = SCHEMES[scheme](error_feedback=False, nmse_budget=None, **given)
    except TypeError as error:
        raise UsageError(
            f"quantize_fsdp: {error}; it accepts bucket_size and min_elements, and for qsgd "
            "also norm and rounding"
        ) from None
    compression.require_fixed_length("quantize_fsdp")
    one_bit = 1 in (bits, *(rule.bits for rule in as_rules(compression.rules)))
    if one_bit and compression.one_bit_is_sign:
        raise UsageError(
            f"quantize_fsdp({what}=1): one bit needs error feedback, which is not supported "
            "with FSDP2; choose 2 to 8"
        )
    return compression


def _no_module(model: nn.Module) -> str:
    if isinstance(model, FullyShardedDataParallel):
        return (
            "quantize_fsdp: FullyShardedDataParallel does not support custom collectives; "
            "shard the model with its successor, torch.distributed.fsdp.fully_shard"
        )
    return (
        f"quantize_fsdp: no module of this {type(model).__name__} is sharded; call "
        "torch.distributed.fsdp.fully_shard on it first"
    )
