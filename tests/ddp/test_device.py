"""The hook's path on GPUs, over NCCL; and over the kernels' twin, with gloo in NCCL's place."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import gpu
from qsgd_hpc.torch._distributed import serves
from qsgd_hpc.torch.ddp import QSGDState, compress
from tests import reference
from tests.ddp.models import batch, bytes_of, exact_mean, gradient, mlp, train, wrapped
from tests.ddp.ranks import Ranks, here
from tests.ddp.test_hook import BOUNDS


@pytest.fixture
def library(request: pytest.FixtureRequest, ranks: Ranks) -> str:
    """The kernels that read the memory of the ranks."""
    return str(request.getfixturevalue("twin") if ranks.place == "host" else gpu.library())


@contextmanager
def kernels(library: str) -> Iterator[Any]:
    """Choose the kernels, and see to it that nothing goes by the host."""
    refuse = mock.patch.object(QSGDState, "_start_pipeline", side_effect=AssertionError("host"))
    with mock.patch.dict(os.environ, QSGD_GPU_LIBRARY=library), refuse:
        yield


def on_device(group: dist.ProcessGroup, library: str, work: Callable[..., Any], *args: Any) -> Any:
    with kernels(library):
        return work(group, *args)


def reduced(group: dist.ProcessGroup, bits: int, settings: dict[str, Any]) -> Any:
    model, _ = wrapped(group, bits, **settings)
    model(batch(group.rank(), 0)).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    wanted = exact_mean(group, 0).split([g.numel() for g in grads])
    errors = [
        float((g.flatten() - w).square().sum() / w.square().sum())
        for g, w in zip(grads, wanted, strict=True)
    ]
    return gradient(model).cpu().numpy().tobytes(), errors


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_are_as_close_as_two_codes_allow_and_vectors_exact(
    ranks: Ranks, library: str, size: int, bits: int
) -> None:
    answers = ranks.run(on_device, library, reduced, bits, {"error_feedback": False}, size=size)
    assert len({grads for grads, _ in answers}) == 1, "replicas differ"
    for errors in (errors for _, errors in answers):
        for matrix in errors[:4:2]:  # the last matrix is below min_elements
            assert matrix <= BOUNDS[bits]
            assert size == 1 or matrix > 1e-7, "nothing was compressed"
        assert max(errors[1::2] + errors[4:]) < 1e-10


def test_rules_by_name_choose_bits(ranks: Ranks, library: str) -> None:
    rules = {"rules": "2.weight=3, 0.weight=8", "error_feedback": False}
    for _, errors in ranks.run(on_device, library, reduced, 2, rules, size=3):
        assert 1e-7 < errors[0] <= BOUNDS[8]
        assert errors[2] > 100 * errors[0]
        assert max(errors[1:2] + errors[3:]) < 1e-10


def test_buckets_are_rotated_on_the_device(ranks: Ranks, library: str) -> None:
    """With error feedback, which one bit asks for; 3 bits lose no more than QSGD's 4."""
    for bits, bound in ((3, BOUNDS[4]), (1, 3)):
        answers = ranks.run(on_device, library, reduced, bits, {"scheme": "eden"}, size=3)
        assert len({grads for grads, _ in answers}) == 1, "replicas differ"
        for _, errors in answers:
            assert all(1e-7 < matrix <= bound for matrix in errors[:4:2])
            assert max(errors[1::2] + errors[4:]) < 1e-10


def one_tensors_input(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3000, generator=torch.Generator().manual_seed(100 * step + rank))


def one_tensor(group: dist.ProcessGroup, steps: int) -> list[bytes]:
    """Return what a tensor of one bucket is after each of several reductions."""
    state = QSGDState(group, 4, error_feedback=False, seed=3, bucket_size=128)
    parameter = torch.nn.Parameter(torch.zeros(50, 60))
    results = []
    for step in range(steps):
        flat = one_tensors_input(step, group.rank()).to(here())
        bucket = mock.Mock()
        bucket.buffer.return_value = flat
        bucket.parameters.return_value = [parameter]
        results.append(state.reduce(bucket).wait().cpu().numpy().tobytes())
    return results


def by_definition(size: int, step: int) -> NDArray[np.float32]:
    """Return the same by numpy: a scatter-reduce of codes, and an allgather of the owners'."""
    count, bucket, name = 3000, 128, zlib.crc32(b"0")  # "0": the first parameter
    xs = [one_tensors_input(step, rank).numpy() for rank in range(size)]

    def sent(x: NDArray[np.float32], rank: int, phase: int) -> NDArray[np.float32]:
        scales, codes = reference.quantise(
            x, bits=4, bucket=bucket, norm="max", seed=3, tensor=name, step=step, rank=rank,
            phase=phase, generator="philox",
        )  # fmt: skip
        return reference.dequantise(scales, codes, bits=4, bucket=bucket, count=count)

    coded = [sent(x, rank, phase=1) for rank, x in enumerate(xs)]
    out = np.empty(count, dtype=np.float32)
    for owner in range(size):
        part = (owner + name % size) % size
        mine = slice(*(min(24 * i // size * bucket, count) for i in (part, part + 1)))
        total = np.zeros(count, dtype=np.float32)
        for rank in range(size):
            total[mine] += (xs if rank == owner else coded)[rank][mine]
        out[mine] = sent(total * np.float32(1 / size), owner, phase=2)[mine]
    return out


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_bit_is_that_of_the_definition(ranks: Ranks, library: str, size: int) -> None:
    for results in ranks.run(on_device, library, one_tensor, 3, size=size):
        for step, result in enumerate(results):
            np.testing.assert_array_equal(
                np.frombuffer(result, dtype=np.float32), by_definition(size, step)
            )


def trained(group: dist.ProcessGroup, bits: int, steps: int, settings: dict[str, Any]) -> Any:
    model, _ = wrapped(group, bits, **settings)
    train(model, group.rank(), range(steps))
    losses = [float(model(batch(r, 0)).detach().square().mean()) for r in range(group.size())]
    return bytes_of(model.module), losses


@pytest.mark.parametrize("bits", [8, 2])
def test_training_with_error_feedback_stays_equal_and_learns(
    ranks: Ranks, library: str, bits: int
) -> None:
    answers = ranks.run(on_device, library, trained, bits, 30, {}, size=2)
    exact = ranks.run(trained, 8, 30, {"start_step": 1000}, size=2)
    assert answers[0][0] == answers[1][0], "replicas differ"
    assert answers[0][1] == pytest.approx(exact[0][1], rel=0.1)


def resumed(group: dist.ProcessGroup, stop: int) -> bytes:
    model, state = wrapped(group, 2)
    train(model, group.rank(), range(stop))
    saved, weights = state.state_dict(), model.module.state_dict()
    again, fresh = wrapped(group, 2)
    again.module.load_state_dict(weights)
    fresh.load_state_dict(saved)
    train(again, group.rank(), range(stop, 8))
    return bytes_of(again.module)


def test_a_saved_state_goes_on_bit_for_bit(ranks: Ranks, library: str) -> None:
    wanted = ranks.run(on_device, library, trained, 2, 8, {}, size=2)
    assert ranks.run(on_device, library, resumed, 4, size=2) == [bits for bits, _ in wanted]


def spoilt(group: dist.ProcessGroup) -> list[list[bool]]:
    """Return which gradients are finite in a step that rank 1 spoils, and in the next one."""
    model, _ = wrapped(group, 4)
    finite = []
    for step in range(2):
        model.zero_grad()
        loss = model(batch(group.rank(), step)).square().mean()
        (loss * float("nan") if (group.rank(), step) == (1, 0) else loss).backward()
        finite.append([bool(p.grad.isfinite().all()) for p in model.parameters()])
    return finite


def test_nan_of_one_rank_reaches_all_and_is_not_fed_back(ranks: Ranks, library: str) -> None:
    assert ranks.run(on_device, library, spoilt, size=2) == [[[False] * 6, [True] * 6]] * 2


def of_type(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[bytes, float]:
    model = DistributedDataParallel(mlp().to(dtype), process_group=group)
    compress(model, 8)
    model(batch(group.rank(), 0).to(dtype)).float().square().mean().backward()
    mean = exact_mean(group, 0)
    error = (gradient(model.module).double() - mean).square().sum() / mean.square().sum()
    return gradient(model.module).float().cpu().numpy().tobytes(), float(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(ranks: Ranks, library: str, dtype: torch.dtype) -> None:
    answers = ranks.run(on_device, library, of_type, dtype, size=2)
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] < 2e-3


@pytest.mark.parametrize(
    ("bits", "settings"),
    [(None, {"scheme": "terngrad"}), (1, {}), (4, {"rules": "0.*=1"}),
     (4, {"scheme": "eden", "bucket_size": 1024})],
)  # fmt: skip
def test_codes_that_the_kernels_do_not_know_go_by_the_host(twin, monkeypatch, bits, settings):
    monkeypatch.setenv("QSGD_GPU_LIBRARY", str(twin))
    host, group = torch.device("cpu"), mock.Mock()
    assert serves(host, QSGDState(bits=bits, **settings).compression, group) is None
    assert serves(host, QSGDState(bits=4).compression, group) == str(twin)
    assert serves(host, QSGDState(bits=1, scheme="eden").compression, group) == str(twin)
    monkeypatch.setenv("QSGD_GPU_LIBRARY", "none")
    assert serves(host, QSGDState(bits=4).compression, group) is None


def test_a_library_of_something_else_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("QSGD_GPU_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(UsageError, match="Install this package again"):
        gpu.library()
    monkeypatch.setenv("QSGD_GPU_LIBRARY", _core.__file__)
    with pytest.raises(UsageError, match="not the GPU kernels"):
        gpu.library()
