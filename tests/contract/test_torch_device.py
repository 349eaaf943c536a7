"""Training with a model on a GPU, where there is one; see test_torch_optimizer.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd
from tests.contract.training import needs_ranks, replicas_are_identical, rows
from tests.gpu.memory import has_device

pytestmark = [
    pytest.mark.usefixtures("torch_job"),
    pytest.mark.skipif(not has_device(), reason="there is no GPU"),
]


def network(dtype=torch.float64):
    torch.manual_seed(5)
    layers = (nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))
    return nn.Sequential(*layers).to("cuda", dtype)


def loss_of(model, shares, step):
    x, y = rows(shares, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x.cuda()), y.cuda())


def train(model, optimizer, shares, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, shares, step).backward()
        optimizer.step()


def wrapped(model, **arguments):
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), **arguments)


def test_ranks_train_as_one_process_with_the_whole_batch():
    serial = network()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(serial))
    train(model, wrapped(model), [hvd.rank()])
    train(serial, torch.optim.Adam(serial.parameters(), lr=0.01), range(hvd.size()))
    assert replicas_are_identical(model)
    for mine, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-7, rtol=0)


def learned(**arguments):
    """Return a model after some steps, and its loss on the first one's data, over all ranks."""
    model = network(torch.float32)
    train(model, wrapped(model, **arguments), [hvd.rank()], steps=60)
    assert replicas_are_identical(model)
    with torch.no_grad():
        return hvd.allreduce(loss_of(model, [hvd.rank()], 0)).item()


@pytest.mark.parametrize("bits", [8, 4])
def test_compression_learns_what_float32_does(bits):
    with torch.no_grad():
        before = hvd.allreduce(loss_of(network(torch.float32), [hvd.rank()], 0)).item()
    compression = hvd.Compression.qsgd(bits=bits, min_elements=0, error_feedback=True)
    exact, coded = learned(), learned(compression=compression)
    assert exact < before
    assert coded < exact + 0.1 * (before - exact)


@needs_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = network(torch.float32)
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, [hvd.rank()], step)
        overflow = step == 1 and hvd.rank() == 1
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        kept = all(map(torch.equal, before, model.parameters()))
        assert kept == (step == 1)
        assert replicas_are_identical(model)


def test_models_and_optimizers_are_broadcast_where_they_are():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, [hvd.rank()])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert replicas_are_identical(model)
    for state in optimizer.state.values():
        assert state["exp_avg"].is_cuda
        assert torch.equal(state["exp_avg"], hvd.broadcast(state["exp_avg"], 0))
