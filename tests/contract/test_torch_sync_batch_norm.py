"""SyncBatchNorm against BatchNorm of all ranks' batches as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd

pytestmark = pytest.mark.usefixtures("torch_job")

CHANNELS = 5


def batch(rank, count, trailing, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    x = 3 + 2 * torch.randn(count, CHANNELS, *trailing, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def plain(dtype, **arguments):
    layer = nn.BatchNorm2d(CHANNELS, dtype=dtype, **arguments)
    layer._check_input_dim = lambda input: None
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2.0, CHANNELS))
            layer.bias.copy_(torch.linspace(-1.0, 1.0, CHANNELS))
    return layer


def loss(y):
    return (y.double() * torch.arange(y.numel()).reshape(y.shape).sin()).sum()


def check(sizes, trailing=(), dtype=torch.float64, steps=3, tolerance=1e-10, **arguments):
    """Train both layers for some steps and compare everything after each."""
    whole = plain(dtype, **arguments)
    mine = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    rank, close = hvd.rank(), {"rtol": tolerance, "atol": tolerance}
    for step in range(steps):
        batches = [batch(10 * step + r, n, trailing, dtype) for r, n in enumerate(sizes)]
        together = torch.cat(batches).requires_grad_()
        x = batches[rank].requires_grad_()
        whole.zero_grad()
        mine.zero_grad()
        everyone, y = whole(together).split(sizes), mine(x)
        torch.testing.assert_close(y, everyone[rank], **close)
        sum(loss(each) for each in everyone).backward()
        loss(y).backward()
        torch.testing.assert_close(x.grad, together.grad.split(sizes)[rank], **close)
        for p, right in zip(mine.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(hvd.allreduce(p.grad, op=hvd.Sum), right.grad, **close)
        for b, right in zip(mine.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(b, right, **close)
    return mine, whole


@pytest.mark.parametrize("trailing", [(), (7,), (4, 3), (2, 3, 2)])
def test_equals_one_batch_of_all(trailing):
    check([6] * hvd.size(), trailing)


def test_batches_may_differ_in_size_and_be_empty():
    check([3 + r for r in range(hvd.size())], (4,))
    check([0 if r == 1 else 5 for r in range(hvd.size())], (4,))


@pytest.mark.parametrize(
    "arguments", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_equals_it_with_other_arguments(arguments):
    check([4] * hvd.size(), (3,), **arguments)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 0.1)]
)
def test_equals_it_in_lower_precision(dtype, tolerance):
    check([4] * hvd.size(), (3,), dtype, steps=1, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_of_a_float_layer(dtype):
    layer = hvd.SyncBatchNorm(CHANNELS)
    x = batch(hvd.rank(), 4, (6,), dtype).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    assert layer.weight.grad.dtype == torch.float32
    everyone = torch.cat([batch(r, 4, (6,), dtype) for r in range(hvd.size())])
    right = nn.BatchNorm1d(CHANNELS)(everyone.float())[4 * hvd.rank() :][:4]
    torch.testing.assert_close(y.float(), right, rtol=0.02, atol=0.02)


def test_a_large_mean_does_not_swallow_the_variance():
    x = (batch(hvd.rank(), 50, ()) + 1e4).float()
    everyone = torch.cat([batch(r, 50, ()) + 1e4 for r in range(hvd.size())])
    right = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(everyone)[50 * hvd.rank() :][:50]
    y = hvd.SyncBatchNorm(CHANNELS)(x)
    torch.testing.assert_close(y.double(), right, rtol=2e-3, atol=2e-3)


def test_evaluation_sends_nothing():
    mine, whole = check([4] * hvd.size(), (3,), steps=1)
    mine.eval()
    whole.eval()
    hvd.barrier()
    before = hvd.communication_stats()["wire_bytes"]
    x = batch(99, 4, (3,))
    torch.testing.assert_close(mine(x), whole(x))
    assert hvd.communication_stats()["wire_bytes"] == before
    hvd.barrier()


def test_parameters_are_shared_with_the_layer_it_replaces():
    model = nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.BatchNorm2d(CHANNELS))
    names = list(model.state_dict())
    weight = model[1].weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted[1], hvd.SyncBatchNorm)
    assert converted[1].weight is weight
    assert list(converted.state_dict()) == names


def test_what_it_cannot_normalise_is_an_error():
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="two dimensions"):
        layer(torch.ones(CHANNELS))
    with pytest.raises(ValueError, match="4 channels"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"at least two|more than 1 value"):
        layer(torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS))
