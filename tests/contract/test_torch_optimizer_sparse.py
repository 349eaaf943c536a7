"""Sparse gradients, process sets and Adasum in ``hvd.DistributedOptimizer``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd
from tests.contract.training import linear, loss_of, needs_ranks, replicas_are_identical

pytestmark = [
    pytest.mark.usefixtures("torch_job"),
    # Of torch's own sparse optimizers.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


def words(shares, step):
    parts = [torch.Generator().manual_seed(100 * step + share) for share in shares]
    return torch.cat([torch.randint(0, 20, (6,), generator=g) for g in parts])


OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"groups": 1},
        {"backward_passes_per_step": 2},
        {"sparse_as_dense": True},
        {"sparse_as_dense": True, "groups": 1},
    ],
)
def test_sparse_gradients_train_as_one_process_with_all_words(make, arguments):
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Embedding(20, 5, sparse=True) for _ in range(2)).double()
    serial = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())), model.named_parameters(), **arguments
    )
    reference = make(list(serial.parameters()))
    passes = arguments.get("backward_passes_per_step", 1)
    for step in range(3):
        for net, tool, shares in [
            (model, optimizer, [hvd.rank()]),
            (serial, reference, range(hvd.size())),
        ]:
            tool.zero_grad()
            for each in range(passes):
                chosen = words(shares, 10 * step + each)
                (net[0](chosen) + net[1](chosen)).pow(2).sum().div(len(shares)).backward()
            tool.step()
        assert replicas_are_identical(model)
    assert model[0].weight.grad.is_sparse
    for mine, expected in zip(model.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-9)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("from_step", [0, 1])
def test_ranks_without_a_sparse_gradient_take_part(from_step, as_dense):
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2, bias=False)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        op=hvd.Sum,
        sparse_as_dense=as_dense,
    )
    before = model[0].weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        chosen = model[0](torch.tensor([1]))
        if step >= from_step and hvd.rank() == hvd.size() - 1:
            chosen.sum().backward()
        else:
            model[1](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    lost = (before - model[0].weight).sum(1)
    assert torch.allclose(lost, torch.tensor([0.0, 2.0 * (3 - from_step), 0.0, 0.0]))
    assert replicas_are_identical(model)


def test_sparse_gradients_may_travel_dense_and_compressed():
    torch.manual_seed(1)
    model = nn.Embedding(20, 100, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=8, min_elements=0),
        sparse_as_dense=True,
    )
    before = model.weight.detach().clone()
    model(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    assert model.weight.grad.is_sparse
    moved = (before - model.weight).mean(1)
    assert torch.allclose(moved[: hvd.size()], torch.tensor(1 / hvd.size()), rtol=0.1)
    assert replicas_are_identical(model)


@needs_ranks(2)
def test_a_sparse_gradient_that_is_not_finite_is_refused_on_every_rank():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    factor = float("inf") if hvd.rank() == 0 else 1.0
    (model(torch.tensor([1])) * factor).sum().backward()
    with pytest.raises(hvd.NonFiniteGradientError, match="'weight' holds NaN or Inf"):
        optimizer.step()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_loss_scaler_skips_overflowed_steps_of_embeddings(sparse):
    model = nn.Embedding(4, 2, sparse=sparse)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    factor = float("inf") if hvd.rank() == 0 else 1.0
    scaler.scale((model(torch.tensor([1])) * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(model.weight, before)


@needs_ranks(3)
def test_only_the_ranks_of_a_process_set_average():
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    model, optimizer = linear(process_set=pair)
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    expected = 4 if pair.included() else hvd.rank() + 1
    assert torch.allclose(before - model.weight, torch.tensor(float(expected)))
    hvd.shutdown()
    hvd.init()
    with pytest.raises(ValueError, match="not registered"):
        linear(process_set=pair)


@needs_ranks(2)
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_adasum_averages_equal_steps_and_adds_orthogonal_ones(compression):
    model = nn.Linear(4, 2, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    before = model.weight.detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), op=hvd.Adasum, compression=compression
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.synchronize()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.tensor(0.5), atol=2e-3)
    assert replicas_are_identical(model)
    before = model.weight.detach().clone()
    optimizer.state.clear()
    optimizer.zero_grad()
    (model.weight.reshape(-1)[hvd.rank()] * 4).backward()
    optimizer.step()
    expected = torch.zeros(8)
    expected[: hvd.size()] = 2.0
    assert torch.allclose((before - model.weight).reshape(-1), expected, atol=2e-3)
    with pytest.raises(ValueError, match="cannot be skipped"):
        optimizer.skip_synchronize()


@needs_ranks(2)
@pytest.mark.parametrize("sparse", [False, True])
def test_adasum_skips_an_overflowed_step_on_every_rank(sparse):
    model = nn.Embedding(4, 2, sparse=sparse)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for overflow in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if overflow and hvd.rank() == 0 else 1.0
        scaler.scale(model(torch.tensor([1])).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert torch.equal(model.weight, before) == overflow
    assert replicas_are_identical(model)


@needs_ranks(2)
def test_adasum_keeps_replicas_equal_when_a_parameter_is_frozen():
    """Its momentum differs between ranks, and moves it while it has a gradient, even of zeros."""
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        op=hvd.Adasum,
    )
    for step in range(4):
        model.bias.requires_grad_(step < 2)
        optimizer.zero_grad(set_to_none=step == 3)
        before = model.bias.detach().clone()
        model(torch.ones(1, 3) * (hvd.rank() + 1)).square().sum().backward()
        optimizer.step()
        assert torch.equal(before, model.bias) == (step == 3)
        assert replicas_are_identical(model)


def test_adasum_takes_no_lossy_compression():
    with pytest.raises(ValueError, match="exact steps"):
        linear(op=hvd.Adasum, compression=hvd.Compression.qsgd(bits=4))
