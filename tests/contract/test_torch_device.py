"""Training with tensors on a GPU, where there is one; see test_torch_optimizer.py.

What does without a stream also runs with the kernels' twin, which takes the CPU's tensors for a
device's.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd
from qsgd_hpc.runtime import gpu
from tests.contract.training import needs_ranks, replicas_are_identical, rows
from tests.gpu.memory import has_device

DEVICE = "cuda" if has_device() else "cpu"

pytestmark = [
    pytest.mark.usefixtures("torch_job"),
    pytest.mark.skipif(gpu.served() != DEVICE, reason="there are neither a GPU nor the twin"),
]
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="there is no GPU")


def network(dtype=torch.float64, device=DEVICE):
    torch.manual_seed(5)
    layers = (nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))
    return nn.Sequential(*layers).to(device, dtype)


def loss_of(model, shares, step):
    first = next(model.parameters())
    x, y = (each.to(first.device) for each in rows(shares, step, first.dtype))
    return nn.functional.mse_loss(model(x), y)


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
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
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
        assert state["exp_avg"].device.type == DEVICE
        assert torch.equal(state["exp_avg"], hvd.broadcast(state["exp_avg"], 0))


def restart(kernels):
    """Enter the job again, on this rank with the kernels or without."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setenv("QSGD_GPU_LIBRARY", "none")
        gpu.served.cache_clear()
        gpu.served()
        hvd.init()


@pytest.fixture
def everywhere():
    """Have all ranks use the kernels again after the test."""
    yield
    restart(kernels=True)


@needs_ranks(2)
@pytest.mark.parametrize("bits", [4, 32])
def test_ranks_with_and_without_a_device_train_alike(everywhere, bits):
    with_device = hvd.rank() % 2 == 0
    restart(with_device)
    model = network(torch.float32, DEVICE if with_device else "cpu")
    # Powers of two, so that fused and separate multiplications and additions round alike.
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-5)
    compression = hvd.Compression.none
    if bits < 32:
        compression = hvd.Compression.qsgd(bits=bits, min_elements=0, error_feedback=True)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
    train(model, optimizer, [hvd.rank()], steps=8)
    assert replicas_are_identical(model)
    assert next(model.parameters()).grad.any()


def test_what_is_owed_on_a_device_is_paid_on_the_host(everywhere):
    """Sums of results and what is owed in the end, over both jobs, make up all gradients."""
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing that could be compressed")
    count, name = 3000, "moved"
    compression = hvd.Compression.qsgd(bits=2, min_elements=0, error_feedback=True)

    def gradient(rank, step):
        return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank))

    def run(steps, device):
        total = torch.zeros(count)
        for step in steps:
            mine = gradient(hvd.rank(), step).to(device)
            total += hvd.allreduce(mine, name=name, compression=compression).cpu()
        return total

    restart(kernels=True)
    total = run(range(4), DEVICE)
    saved = hvd.error_feedback_state()
    assert saved[name].any()
    restart(kernels=False)
    hvd.load_error_feedback_state(saved)
    total += run(range(4, 8), "cpu")
    owed = hvd.error_feedback_state()[name]
    ranks = range(hvd.size())
    expected = sum(gradient(rank, step) for rank in ranks for step in range(8)) / hvd.size()
    torch.testing.assert_close(total + owed, expected, atol=1e-4, rtol=0)


def test_tensors_of_host_and_device_are_reduced_in_one_call():
    mine = hvd.rank() + 1.0
    # Not on the same side on every rank.
    devices = [DEVICE, "cpu", DEVICE] if hvd.rank() % 2 == 0 else ["cpu", DEVICE, DEVICE]
    types = [torch.float32, torch.float32, torch.int64]
    tensors = [
        torch.full((100 + i,), mine, device=device).to(dtype)
        for i, (device, dtype) in enumerate(zip(devices, types, strict=True))
    ]
    expected = sum(range(1, hvd.size() + 1))
    for reduced in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.grouped_allreduce_([t.clone() for t in tensors], op=hvd.Sum),
    ):
        assert [t.device.type for t in reduced] == devices
        assert all((t == expected).all() for t in reduced)
    gathered = hvd.grouped_allgather(tensors)
    assert [t.device.type for t in gathered] == devices
    assert all(t.sum() == len(mine_) * expected for t, mine_ in zip(gathered, tensors, strict=True))


INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS, *FLOATS])
def test_every_type_is_reduced_as_on_the_host(dtype):
    values = torch.arange(1000).remainder(7) + hvd.rank()
    there = values.to(getattr(torch, dtype))
    here, op = there.to(DEVICE), hvd.Sum
    expected = hvd.allreduce(there, op=op)
    assert hvd.allreduce(here, op=op).tolist() == expected.tolist()
    assert here.tolist() == there.tolist(), "the source has changed"
    turned = here.clone().reshape(20, 50).t()  # not contiguous
    assert hvd.allreduce_(turned, op=op).tolist() == expected.reshape(20, 50).t().tolist()
    assert hvd.allreduce_(here, op=op) is here
    assert here.tolist() == expected.tolist()
    mine = torch.full((5,), hvd.rank() + 1, device=DEVICE).to(here.dtype)
    assert hvd.broadcast(mine, 0).tolist() == [1] * 5
    assert hvd.allgather(mine).numel() == 5 * hvd.size()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_of_every_type_are_equal_on_every_rank(dtype, bits):
    compression = hvd.Compression.qsgd(bits=bits, min_elements=0)
    mine = torch.randn(5000, generator=torch.Generator().manual_seed(hvd.rank())).to(DEVICE, dtype)
    reduced = hvd.allreduce(mine, compression=compression)
    assert reduced.dtype == dtype
    assert torch.equal(reduced, hvd.broadcast(reduced, 0))
    exact = hvd.allreduce(mine.float())
    # At most one level of the largest of a bucket, twice: of the parts, and of their sum.
    level = mine.abs().max().float() / (2 ** (bits - 1) - 1)
    bound = hvd.allreduce(level, op=hvd.Max) * 2.2 + 0.05
    assert (reduced.float() - exact).abs().max() <= bound


LATE = 200_000_000  # cycles, about a tenth of a second


@on_gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_a_result_may_be_used_in_any_stream_at_once(in_place):
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    expected = sum(range(1, hvd.size() + 1))
    handles = []
    for _ in range(4):
        x = torch.zeros(1 << 20, device=DEVICE)
        torch.cuda._sleep(LATE // 4)
        handles.append(start(x.add_(hvd.rank() + 1), op=hvd.Sum))
    for handle in handles:
        with torch.cuda.stream(torch.cuda.Stream()):
            assert (hvd.synchronize(handle) == expected).all()


@on_gpu
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("computed_in", ["side", "default"])
def test_gradients_of_another_stream_are_awaited(compression, groups, computed_in):
    model = network(torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), compression=compression, groups=groups
    )
    expected = None
    for late in (False, True, True):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.default_stream()]
        computing, averaging = streams if computed_in == "side" else reversed(streams)
        with torch.cuda.stream(computing):
            torch.cuda._sleep(LATE * late)
            loss_of(model, [hvd.rank()], 0).backward()
        with torch.cuda.stream(averaging):
            optimizer.synchronize()
            averages = [p.grad.clone() for p in model.parameters()]
        expected = expected or averages
        for mine, other in zip(averages, expected, strict=True):
            # NCCL's order of a sum depends on what is fused, and 16 bits round each addition.
            torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3)


@on_gpu
@needs_ranks(2)
def test_nan_on_a_device_is_named_with_tensor_and_rank():
    last = hvd.size() - 1
    model = nn.Linear(64, 64).to(DEVICE)
    for compression in (hvd.Compression.none, hvd.Compression.qsgd(bits=4, min_elements=0)):
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), compression=compression
        )
        x = torch.ones(1, 64, device=DEVICE)
        if hvd.rank() == last:
            x[0, 3] = float("nan")
        model(x).sum().backward()
        with pytest.raises(hvd.NonFiniteGradientError, match=f"weight.*rank.* {last}"):
            optimizer.step()
        optimizer.zero_grad()


WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


@on_gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("bits", [4, 32])
def test_the_host_never_waits_for_the_device(bits):
    """From the backward pass to the end of the step, no thread waits or copies pageable memory."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).to(DEVICE)
    compression = hvd.Compression.none
    if bits < 32:
        compression = hvd.Compression.qsgd(bits=bits, error_feedback=True)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
    x = torch.randn(64, 512, device=DEVICE)

    def step(name):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        with torch.profiler.record_function(name):
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    for _ in range(3):
        step("before")
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        step("watched")
    events = profile.events()
    on_host = torch.autograd.DeviceType.CPU
    (watched,) = (e.time_range for e in events if e.name == "watched" and e.device_type == on_host)
    within = {e.name for e in events if watched.start <= e.time_range.start <= watched.end}
    assert any("emcpy" in name or "Launch" in name for name in within), "nothing was recorded"
    assert not [name for name in within if name in WAITS or "Pageable" in name]
