"""``torch.amp`` with ``hvd.DistributedOptimizer``, on any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd
from tests.contract.training import needs_ranks, replicas_are_identical, rows

pytestmark = pytest.mark.usefixtures("torch_job")


COMPRESSIONS = {
    "float32": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "4 bits": lambda: hvd.Compression.qsgd(bits=4, min_elements=0, error_feedback=True),
}


def build(compression, **arguments):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    inner = torch.optim.Adam(model.parameters(), lr=0.01, **arguments)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)


def scaled_backward(model, optimizer, scaler, step, overflow_on=None):
    x, y = rows([hvd.rank()], step, torch.float32)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if hvd.rank() == overflow_on:
        loss = loss * float("inf")
    scaler.scale(loss).backward()


def plainly(model, optimizer, scaler):
    scaler.step(optimizer)


def clipping(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer)


def as_documented_by_horovod(model, optimizer, scaler):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
@pytest.mark.parametrize("end", [plainly, clipping, as_documented_by_horovod])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(compression, end, fused):
    model, optimizer = build(compression(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        before = copy.deepcopy(model.state_dict())
        scale = scaler.get_scale()
        overflow_on = hvd.size() - 1 if step in (2, 3) else None
        scaled_backward(model, optimizer, scaler, step, overflow_on)
        end(model, optimizer, scaler)
        scaler.update()
        moved = not all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert moved == (overflow_on is None)
        assert scaler.get_scale() == (scale if moved else scale / 2)
        assert replicas_are_identical(model)
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_only_error_feedback_reads_whether_a_fused_step_was_skipped(compression, monkeypatch):
    # A fused optimizer reads the flag on the device; the host would wait for the device.
    model, optimizer = build(COMPRESSIONS[compression](), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_backward(model, optimizer, scaler, 0)
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(0) or item(tensor))
    scaler.step(optimizer)
    assert bool(read) == (compression == "4 bits" and hvd.size() > 1)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_disabled_scaler_steps_as_the_optimizer_does(compression):
    model, optimizer = build(COMPRESSIONS[compression]())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = copy.deepcopy(model.state_dict())
    scaled_backward(model, optimizer, scaler, 0)
    clipping(model, optimizer, scaler)
    scaler.update()
    assert not any(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert replicas_are_identical(model)


def test_scaled_gradients_train_as_unscaled_ones_do():
    model, optimizer = build(hvd.Compression.none)
    plain, plain_optimizer = build(hvd.Compression.none)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaled_backward(model, optimizer, scaler, step)
        scaler.step(optimizer)
        scaler.update()
        x, y = rows([hvd.rank()], step, torch.float32)
        plain_optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        plain_optimizer.step()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-6)


@needs_ranks(2)
def test_an_overflow_does_not_poison_error_feedback():
    model, optimizer = build(COMPRESSIONS["4 bits"]())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hvd.load_error_feedback_state({})
    for step in range(3):
        scaled_backward(model, optimizer, scaler, step, overflow_on=0 if step == 1 else None)
        scaler.step(optimizer)
        scaler.update()
        owed = hvd.error_feedback_state()
        assert all(v.isfinite().all() for v in owed.values())
        assert len(owed) == (0 if step == 1 else 2)


@needs_ranks(2)
def test_skipped_steps_leave_nothing_to_the_steps_that_follow():
    """Whose scale is smaller, so that what is owed of finite gradients would be far too much."""
    finite, overflowing = (nn.Parameter(torch.zeros(8, 64)) for _ in range(2))
    gradient = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([finite, overflowing], lr=1.0),
        [("finite", finite), ("overflowing", overflowing)],
        compression=hvd.Compression.qsgd(bits=2, min_elements=0, error_feedback=True),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(9):
        optimizer.zero_grad()
        # Its gradient is infinite in float16 until the scale is 2^9.
        loss = overflowing.half().float().sum() * 100 + (finite * gradient).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    taken = 9 - 7
    assert scaler.get_scale() == 2.0**9
    (owed,) = (v for k, v in hvd.error_feedback_state().items() if k.endswith("finite"))
    total = owed.reshape(8, 64) / scaler.get_scale() - finite.detach()
    assert torch.allclose(total, taken * gradient, atol=1e-4)


@needs_ranks(2)
def test_without_a_scaler_the_step_refuses_what_is_not_finite():
    model, optimizer = build(hvd.Compression.none)
    before = copy.deepcopy(model.state_dict())
    scaled_backward(model, optimizer, torch.amp.GradScaler("cpu"), 0, overflow_on=0)
    optimizer.synchronize()
    assert not any(p.grad.isfinite().all() for p in model[0].parameters())
    with (
        optimizer.skip_synchronize(),
        pytest.raises(hvd.NonFiniteGradientError, match=r"rank\(s\) 0"),
    ):
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_autocast_in_bfloat16_trains_to_identical_replicas():
    model, optimizer = build(hvd.Compression.qsgd(bits=8, min_elements=0))
    losses = []
    for _ in range(30):
        x, y = rows([hvd.rank()], 0, torch.float32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach())))
    assert replicas_are_identical(model)
    assert losses[-1] < 0.7 * losses[0]
