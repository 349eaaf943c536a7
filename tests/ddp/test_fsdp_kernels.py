"""FSDP2's shards coded where they are: by the kernels on GPUs, or by the kernels' twin.

On GPUs over NCCL, and over gloo, which copies through pinned host memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from qsgd_hpc.compression import Eden, Lossy, Qsgd
from qsgd_hpc.runtime import gpu
from qsgd_hpc.torch.fsdp import codec, collectives, quantize_fsdp
from qsgd_hpc.torch.fsdp.collectives import QSGDAllGather, QSGDReduceScatter, ShardedModule
from qsgd_hpc.torch.fsdp.layout import Part
from tests.ddp.ranks import Ranks, gloo_beside, here

PARTS = (
    Part("scale", (41,), 0),
    Part("a.weight", (53, 70), 0),
    Part("a.bias", (53,), 0),
    Part("b.weight", (30, 120), 1),
    Part("small", (9, 5), 0),
    Part("head.weight", (7, 601), 0),
)
Bits = list[bytes]


@pytest.fixture
def library(request: pytest.FixtureRequest, ranks: Ranks) -> str:
    """The kernels that read the memory of the ranks."""
    return str(request.getfixturevalue("twin") if ranks.place == "host" else gpu.library())


@pytest.fixture(params=["own", "gloo"])
def carrier(request: pytest.FixtureRequest, ranks: Ranks) -> str:
    """What carries the codes: the ranks' own group, which is NCCL's on GPUs, or a new one."""
    if request.param == "gloo" and ranks.place == "host":
        pytest.skip("the ranks' own group is of gloo")
    return str(request.param)


@contextmanager
def coded_by(library: str) -> Iterator[None]:
    """Code by kernels, or with "none" on the host; the other way must not be taken.

    The host draws the noise that kernels draw.
    """
    other = "DeviceCodec" if library == "none" else "HostCodec"
    refuse = mock.patch.object(collectives, other, side_effect=AssertionError(other))
    philox = functools.partial(codec._core.encode_into, generator="philox")
    with (
        mock.patch.dict(os.environ, QSGD_GPU_LIBRARY=library),
        mock.patch.object(codec._core, "encode_into", philox),
        refuse,
    ):
        yield


def carried_by(carrier: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group if carrier == "own" else gloo_beside(group)


def numbers(count: int, dtype: torch.dtype, *key: int) -> torch.Tensor:
    seed = sum(1000**place * value for place, value in enumerate(key))
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).to(here())


def exchanged(
    group: dist.ProcessGroup, compression: Lossy, dtype: torch.dtype, op: Any, steps: int = 2
) -> Bits:
    """Return the bits of some steps' gradients and weights of a module."""
    ranks, me = group.size(), group.rank()
    module = ShardedModule("", PARTS, me, seed=5, threads=2)
    reduction, gathering = (
        QSGDReduceScatter(module, compression),
        QSGDAllGather(module, compression),
    )
    count = sum(part.elements(ranks) for part in PARTS)
    bits = []
    for step in range(steps):
        gradients = numbers(ranks * count, dtype, step, me)
        reduced = reduction.allocate((count,), dtype=dtype, device=here())
        weights = gathering.allocate((ranks * count,), dtype=dtype, device=here())
        shard = weights[me * count :][:count]
        shard.copy_(numbers(count, dtype, step, me, 1))
        with unwaited(first=step == 0, group=group):
            gathering(weights, shard, group)
            reduction(reduced, gradients, group, op)
        bits += [t.cpu().view(torch.uint8).numpy().tobytes() for t in (reduced, weights)]
    return bits


@contextmanager
def unwaited(*, first: bool, group: dist.ProcessGroup) -> Iterator[None]:
    """See to it that the host does not wait for a GPU, once tables and communicators are there."""
    if first or here().type == "cpu" or coders_wait(group):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def coders_wait(group: dist.ProcessGroup) -> bool:
    """Tell whether the host waits by design: it codes, or gloo carries the codes."""
    by_host = os.environ.get("QSGD_GPU_LIBRARY") == "none"
    return by_host or "nccl" not in dist.get_backend_config(group)


def both_ways(
    group: dist.ProcessGroup, library: str, carrier: str, *args: Any
) -> tuple[list[bool], Bits]:
    """Return whether each result of the kernels is that of the host, and the kernels' results."""
    carrying = carried_by(carrier, group)
    with coded_by("none"):
        wanted = exchanged(carrying, *args)
    with coded_by(library):
        got = exchanged(carrying, *args)
    return [a == b for a, b in zip(got, wanted, strict=True)], got


@pytest.mark.parametrize("size", [2, 3, 4])
def test_kernels_and_processor_give_the_same_bits(
    ranks: Ranks, library: str, carrier: str, size: int
) -> None:
    compression = Qsgd(4, rules="a.*=8, head*=2, b*=4")
    args = (compression, torch.float32, dist.ReduceOp.AVG)
    answers = ranks.run(both_ways, library, carrier, *args, size=size)
    for same, _ in answers:
        assert same == [True] * 4
    gathered = {bits[step] for _, bits in answers for step in (1, 3)}
    assert len(gathered) == 2, "ranks have other weights, or steps the same ones"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("compression", [Qsgd(3, bucket_size=1024, norm="l2"), Eden(2)])
def test_other_types_and_codes_give_the_same_bits(
    ranks: Ranks, library: str, compression: Lossy, dtype: torch.dtype
) -> None:
    args = (compression, dtype, dist.ReduceOp.SUM)
    for same, _ in ranks.run(both_ways, library, "own", *args, size=3):
        assert same == [True] * 4


def spoilt(group: dist.ProcessGroup, library: str) -> tuple[bool, bool]:
    """Return whether the owned buckets that rank 1 spoils are not finite, and the others are."""
    ranks, me, count = group.size(), group.rank(), 2048
    module = ShardedModule("", (Part("w", (ranks, count), 0),), me, seed=5, threads=1)
    gradients = numbers(ranks * count, torch.float32, me)
    if me == 1:
        gradients[100::count] = torch.nan
    out = torch.empty(count, device=here())
    with coded_by(library):
        compression = Qsgd(4, bucket_size=512)
        QSGDReduceScatter(module, compression)(out, gradients, group, dist.ReduceOp.AVG)
    bad = out[:512] if me != 1 else out[100:101]  # its own part is uncoded
    return not bool(bad.isfinite().any()), bool(out[512:].isfinite().all())


def test_nan_of_one_rank_is_seen_by_every_owner(ranks: Ranks, library: str) -> None:
    assert ranks.run(spoilt, library, size=3) == [(True, True)] * 3


class Transformer(nn.Module):
    """Predicts the next of 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        layer = functools.partial(
            nn.TransformerEncoderLayer, 64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def trained(group: dist.ProcessGroup, library: str, carrier: str) -> tuple[list[float], float]:
    """Return the losses of a training, and the fraction of the bytes that it has sent."""
    torch.manual_seed(1)
    numbers = torch.Generator().manual_seed(group.rank())
    with coded_by(library):
        model = Transformer().to(here())
        mesh = DeviceMesh.from_group(carried_by(carrier, group), here().type)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        shards = quantize_fsdp(model, gradient_bits=4, weight_bits=8)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        losses = []
        for _ in range(40):
            tokens = torch.randint(32, (8, 16), generator=numbers).to(here())
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), ((3 * tokens + 1) % 32).flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        sent = shards.traffic()
    plain = sent["gradients_uncoded"] + sent["weights_uncoded"]
    return losses, (sent["gradients"] + sent["weights"]) / plain


def test_a_transformer_learns(ranks: Ranks, library: str, carrier: str) -> None:
    answers = ranks.run(trained, library, carrier, size=2)
    for losses, fraction in answers:
        assert losses[-1] < losses[0] / 4
        assert fraction < 0.3
    if ranks.place == "host":  # a GPU adds up the embedding's gradients in any order
        assert answers == ranks.run(trained, "none", carrier, size=2)
