"""FSDP2 with a compressed reduce-scatter, against the exact mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.fsdp import QSGDReduceScatter
from tests.ddp.models import batch, exact_mean, mlp
from tests.ddp.ranks import Ranks


def sharded_gradients(group: dist.ProcessGroup, bits: int | None) -> tuple[float, float]:
    model = mlp()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and bits is not None:
            module.set_custom_reduce_scatter(QSGDReduceScatter(bits, name=name))
    model(batch(group.rank(), 0)).square().mean().backward()
    grads = [p.grad.full_tensor().flatten().double() for p in model.parameters()]
    exact = exact_mean(group, 0).split([g.numel() for g in grads])
    errors = [
        float((g - e).square().sum() / e.square().sum()) for g, e in zip(grads, exact, strict=True)
    ]
    return errors[0], errors[4]  # the root's own layer is below min_elements


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp2_gradients_are_as_close_to_the_mean_as_one_code_allows(
    ranks: Ranks, size: int
) -> None:
    for coded, small in ranks.run(sharded_gradients, 8, size=size):
        assert 1e-7 < coded < 4.9e-4
        assert small < 1e-10


def test_one_bit_is_refused() -> None:
    with pytest.raises(UsageError, match="needs error feedback"):
        QSGDReduceScatter(1)


def test_open_bits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"QSGDReduceScatter\(bits='auto'\)"):
        QSGDReduceScatter("auto")  # type: ignore[arg-type]


def test_other_operations_are_refused() -> None:
    with pytest.raises(UsageError, match="sums and averages"):
        QSGDReduceScatter()(torch.zeros(1), torch.zeros(1), None, dist.ReduceOp.MAX)
