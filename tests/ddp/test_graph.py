"""Steps that are captured as a CUDA graph and replayed; where there is a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from qsgd_hpc.runtime import gpu
from qsgd_hpc.torch.ddp import QSGDState
from tests.ddp.models import batch, bytes_of, wrapped
from tests.ddp.ranks import Ranks, here
from tests.ddp.test_device import by_definition, kernels, one_tensors_input
from tests.gpu.memory import has_device

pytestmark = pytest.mark.skipif(not has_device(), reason="graphs are captured of a GPU's work")


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    if ranks.place != "device":
        pytest.skip("these ranks compute on the CPU")
    return ranks


def captured(work: Any, warm_up: int) -> torch.cuda.CUDAGraph:
    """Return the graph of what ``work()`` queues, after it was done ``warm_up`` times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed(group: dist.ProcessGroup, steps: int) -> tuple[list[bytes], int]:
    """Return what a tensor is after each step, the first of them not captured."""
    state = QSGDState(group, 4, error_feedback=False, seed=3, bucket_size=128)
    bucket = mock.Mock()
    flat, given = (torch.zeros(3000, device=here()) for _ in range(2))
    bucket.buffer.return_value = flat
    bucket.parameters.return_value = [torch.nn.Parameter(torch.zeros(50, 60, device=here()))]
    results = []

    def work() -> None:
        flat.copy_(given)
        state.reduce(bucket).wait()

    with kernels(str(gpu.library())):
        given.copy_(one_tensors_input(0, group.rank()))
        graph = captured(work, warm_up=1)
        results.append(flat.cpu().numpy().tobytes())
        for step in range(1, steps):
            given.copy_(one_tensors_input(step, group.rank()))
            graph.replay()
            results.append(flat.cpu().numpy().tobytes())
    return results, state.state_dict()["parameters"]["0"]["steps"]


@pytest.mark.parametrize("size", [2, 3])
def test_a_replayed_average_rounds_anew_as_the_definition_says(ranks: Ranks, size: int) -> None:
    for results, steps in ranks.run(replayed, 4, size=size):
        assert steps == 4
        for step, result in enumerate(results):
            assert result == by_definition(size, step).tobytes()


def trained(group: dist.ProcessGroup, eager: int, replays: int) -> bytes:
    """Return the weights after so many steps; DDP asks for 11 before it is captured."""
    torch.cuda.set_stream(torch.cuda.Stream())  # DDP must begin beside the default stream
    model, _ = wrapped(group, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = batch(group.rank(), 0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    with kernels(str(gpu.library())):
        if replays:
            graph = captured(step, eager)
        else:
            for _ in range(eager):
                step()
        for _ in range(replays):
            graph.replay()
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())
    return bytes_of(model)


def test_a_captured_step_trains_as_one_that_is_not(ranks: Ranks) -> None:
    eager = ranks.run(trained, 16, 0, size=2)
    assert len({*eager, *ranks.run(trained, 11, 5, size=2)}) == 1
