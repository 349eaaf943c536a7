"""Distributed optimizers that share parameters, are copied, or whose gradients are discarded."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qsgd_hpc.torch as hvd
from qsgd_hpc.frameworks.grouping import BATCH_BYTES
from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.torch.gradients import GradientReducer
from tests.contract.training import linear, loss_of, needs_ranks, replicas_are_identical

pytestmark = pytest.mark.usefixtures("torch_job")

LARGE = BATCH_BYTES // 4  # elements whose reduction starts in the backward pass


def wrapped(parameters, **arguments):
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **arguments)


def moved(parameter, optimizer):
    before = parameter.detach().clone()
    optimizer.step()
    return before - parameter.detach()


@pytest.fixture
def starts(monkeypatch):
    """Names of parameters in the order in which their reductions start."""
    monkeypatch.setattr(GradientReduction, "alone", False)  # one rank reduces, too
    order, own = [], GradientReducer._start

    def start(self, members, *, together):
        assert not together or len(members) == 1
        order.extend(each.name for each in members)
        own(self, members, together=together)

    monkeypatch.setattr(GradientReducer, "_start", start)
    return order


def test_small_gradients_wait_for_company_and_start_in_order(starts):
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 5, LARGE)]
    optimizer = wrapped(parameters)
    parameters[0].sum().backward()
    parameters[1].sum().backward()
    assert starts == []
    assert optimizer._reducer.busy
    parameters[2].sum().backward()
    assert starts == ["0", "1", "2"]
    optimizer.step()
    assert not optimizer._reducer.busy


def test_a_step_starts_what_no_backward_pass_has_started(starts):
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    optimizer = wrapped(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    optimizer.zero_grad()
    starts.clear()
    parameters[1].sum().backward()
    assert starts == []
    assert torch.equal(moved(parameters[0], optimizer), torch.zeros(3))
    assert starts == ["1", "0"]


def test_a_discarded_step_leaves_nothing_for_the_next(starts):
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, LARGE)]
    optimizer = wrapped(parameters)
    parameters[0].sum().backward()
    optimizer._reducer.discard()
    assert not optimizer._reducer.busy
    parameters[1].sum().backward()
    assert starts == ["1"]
    optimizer.step()


TURNS = {
    "alike": ({}, {}),
    "sums": ({"op": hvd.Sum}, {}),
    "groups": ({"groups": 1}, {"groups": 1}),
    "passes": ({"backward_passes_per_step": 2}, {}),
    "coded": ({"compression": hvd.Compression.fp16}, {}),
    "adasum": ({"op": hvd.Adasum}, {}),
}


@pytest.mark.parametrize("how", TURNS.values(), ids=TURNS)
def test_optimizers_take_turns_on_the_same_parameters(how):
    shared = [nn.Parameter(torch.zeros(n)) for n in (LARGE, 3)]
    pair = [wrapped(shared, **arguments) for arguments in how]
    for parameter in shared:
        parameter.grad = torch.zeros_like(parameter)
    for turn in (0, 1, 1, 0, 1):
        optimizer, arguments = pair[turn], how[turn]
        passes = arguments.get("backward_passes_per_step", 1)
        for parameter in shared:
            parameter.grad.zero_()  # where a stale reduction would write
        for _ in range(passes):
            sum((hvd.rank() + 1.0) * p.sum() for p in shared).backward()
        before = [p.detach().clone() for p in shared]
        optimizer.step()
        expected = passes * (hvd.size() + 1) / 2
        if arguments.get("op") is hvd.Sum:
            expected *= hvd.size()
        for parameter, old in zip(shared, before, strict=True):
            if arguments.get("op") is not hvd.Adasum or hvd.size() < 3:
                assert torch.allclose(old - parameter, torch.tensor(expected))
            assert torch.equal(parameter, hvd.broadcast(parameter, 0))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_optimizers_take_turns_on_sparse_gradients():
    model = nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_parameters(model.state_dict())
    pair = [wrapped(model.parameters()), wrapped(model.parameters(), sparse_as_dense=True)]
    for turn in range(4):
        model.zero_grad()
        model(torch.tensor([hvd.rank()])).sum().backward()
        step = moved(model.weight, pair[turn % 2])
        assert torch.allclose(step[: hvd.size()], torch.tensor(1 / hvd.size()))
        assert torch.equal(step[hvd.size() :], torch.zeros_like(step[hvd.size() :]))


@pytest.mark.parametrize("dropped", [False, True])
def test_an_optimizer_made_in_the_midst_of_a_step_finds_nothing_in_flight(dropped):
    weights = [nn.Parameter(torch.zeros(n)) for n in (LARGE, 3, LARGE)]
    old = wrapped(weights, op=hvd.Sum)
    used = weights if hvd.rank() == 0 else weights[:1]  # the others have started less
    sum(p.sum() for p in used).backward()
    if dropped:
        del old
    new = wrapped(weights, op=hvd.Sum)
    for parameter in weights:
        if parameter.grad is not None:
            parameter.grad.zero_()
    sum((hvd.rank() + 1.0) * p.sum() for p in weights).backward()
    total = hvd.size() * (hvd.size() + 1) / 2
    new.step()
    for parameter in weights:
        assert torch.equal(parameter, torch.full_like(parameter, -total))


@needs_ranks(2)
def test_one_of_two_optimizers_that_is_left_reduces_in_the_backward_pass_again():
    weight = nn.Parameter(torch.zeros(LARGE))
    first, second = wrapped([weight]), wrapped([weight])
    first.zero_grad()
    weight.sum().backward()
    second.step()
    second.zero_grad()
    del first
    before = hvd.communication_stats()["allreduces"]
    weight.sum().backward()
    while hvd.communication_stats()["allreduces"] == before:
        pass
    second.step()


def reloaded(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


COPIES = {
    "torch.save": reloaded,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
    "allgather_object": lambda thing: hvd.allgather_object(thing)[hvd.rank()],
}


@pytest.mark.parametrize("replicate", COPIES.values(), ids=COPIES)
def test_a_wrapped_model_can_be_saved_copied_and_broadcast(replicate):
    model, optimizer = linear()
    model.add_module("norm", hvd.SyncBatchNorm(3))
    rows = torch.full((2, 3), hvd.rank() + 1.0) * torch.tensor([[1.0], [-1.0]])
    normal = model.norm(rows)
    twin = replicate(model)
    assert torch.equal(twin.norm(rows), normal)
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(hvd.broadcast_object(model).weight, model.weight)
    assert not vars(model.weight)
    loss_of(model).backward()
    for _ in range(2):  # of which the optimizer learns nothing
        loss_of(twin).backward()
    assert torch.equal(twin.weight.grad, torch.full((1, 3), 2.0 * (hvd.rank() + 1)))
    expected = hvd.size() * (hvd.size() + 1) / 2
    assert torch.allclose(moved(model.weight, optimizer), torch.tensor(expected))
    twin_optimizer = wrapped(twin.parameters(), op=hvd.Sum)
    twin.zero_grad()
    loss_of(twin).backward()
    assert torch.allclose(moved(twin.weight, twin_optimizer), torch.tensor(expected))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("replicate", COPIES.values(), ids=COPIES)
def test_a_saved_optimizer_is_the_wrapped_one_with_its_state(replicate, op):
    model = nn.Linear(3, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(inner, step_size=1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
    optimizer.load_state_dict(optimizer.state_dict())  # from here on states are not shared
    loss_of(model).backward()
    optimizer.step()
    twin = replicate(optimizer)
    assert isinstance(twin, torch.optim.SGD)
    assert (type(twin) is torch.optim.SGD) == (replicate is not copy.deepcopy)
    mine, its = optimizer.state_dict(), twin.state_dict()
    assert its["param_groups"] == mine["param_groups"]
    assert torch.equal(its["state"][0]["momentum_buffer"], mine["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("arguments", [{}, {"groups": 1}, {"op": hvd.Adasum}])
def test_a_copied_optimizer_averages_for_the_copied_model(arguments):
    model = nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = wrapped(model.parameters(), **arguments)
    if hvd.rank() == 0:  # keeps the best so far, which takes no name from what the others make
        copy.deepcopy((model, optimizer))
    twin, twin_optimizer = copy.deepcopy((model, wrapped(model.parameters(), **arguments)))
    for net, tool in [(model, optimizer), (twin, twin_optimizer)]:
        loss_of(net).backward()
        tool.step()
        assert replicas_are_identical(net)
    assert torch.equal(twin.weight, model.weight)


def test_a_group_takes_up_a_thawed_member_where_ranks_use_other_branches():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    weights[2].requires_grad_(False)
    optimizer = wrapped(weights, op=hvd.Sum, groups=[weights])
    for thawed in (False, True, True):
        weights[2].requires_grad_(thawed)
        optimizer.zero_grad()
        used = weights if hvd.rank() == 0 else weights[:1]
        sum(p.sum() for p in used).backward()
        optimizer.step()
    ends = [1.0 - 3 * hvd.size(), 1.0 - 3, 1.0 - 2]
    for parameter, end in zip(weights, ends, strict=True):
        assert torch.equal(parameter, torch.full((3,), end))


DISCARDS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: setattr(model.weight, "grad", None),
}


@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("discard", DISCARDS.values(), ids=DISCARDS)
def test_discarded_gradients_do_not_count_towards_a_step(discard, groups):
    model, optimizer = linear(backward_passes_per_step=3, groups=groups)
    for discarded in (1, 2, 0):
        for _ in range(discarded):
            loss_of(model).backward()
        discard(model, optimizer)
        for _ in range(3):
            loss_of(model).backward()
        total = 3 * hvd.size() * (hvd.size() + 1) / 2
        assert torch.allclose(moved(model.weight, optimizer), torch.tensor(total))
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_layer_used_twice_under_checkpointing_is_told_the_form_that_works():
    net = nn.Linear(3, 3, bias=False)
    hvd.broadcast_parameters(net.state_dict())
    optimizer = wrapped(net.parameters(), op=hvd.Sum)

    def backward(reentrant):
        x = torch.ones(1, 3, requires_grad=True)
        once = checkpoint(net, x, use_reentrant=reentrant)
        checkpoint(net, once, use_reentrant=reentrant).sum().backward()

    backward(reentrant=False)
    optimizer.step()
    assert replicas_are_identical(net)
    optimizer.zero_grad()
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="pass use_reentrant=False to checkpoint"):
            backward(reentrant=True)
        optimizer.synchronize()
