"""What a DistributedOptimizer promises a training loop, on any number of ranks."""

from __future__ import annotations

import contextlib
import copy
import sys

import pytest
import torch

import qsgd_hpc.torch as hvd
from tests.contract.training import linear, loss_of

pytestmark = pytest.mark.usefixtures("torch_job")


def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3)
    )


def batch(rank, step, n=8):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(n, 40, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_equals_one_rank_that_sees_every_gradient(make):
    """Without batch norm, the averaged gradient is the gradient of the mean loss of all ranks."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
    ).double()
    serial = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters()
    )
    reference = make(serial.parameters())
    loss_of = torch.nn.CrossEntropyLoss()
    for step in range(5):
        x, y = batch(hvd.rank(), step)
        optimizer.zero_grad()
        loss_of(model(x.double()), y).backward()
        optimizer.step()
        reference.zero_grad()
        everyone = [batch(r, step) for r in range(hvd.size())]
        x, y = (torch.cat(parts) for parts in zip(*everyone, strict=True))
        loss_of(serial(x.double()), y).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-9)


@pytest.mark.parametrize("bits", [None, 2, 4, 8])
def test_training_from_different_starts_ends_in_one_model(bits):
    model = build(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.none if bits is None else hvd.Compression.qsgd(bits=bits)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    for step in range(10):
        x, y = batch(hvd.rank(), step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for parameter in model.parameters():
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


def bytes_of_a_step(**arguments):
    model = torch.nn.Linear(400, 400)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **arguments
    )
    before = hvd.communication_stats()["wire_bytes"]
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    return hvd.communication_stats()["wire_bytes"] - before


def test_none_is_an_opinion_here_and_none_where_a_script_imports_horovod(monkeypatch):
    monkeypatch.setenv("QSGD_BITS", "4")
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing that could be compressed")
    told = contextlib.nullcontext()
    if hvd.rank() == 0:
        told = pytest.warns(UserWarning, match="in the script overrides QSGD_BITS=4 of")
    with told:
        exact = bytes_of_a_step(compression=hvd.Compression.none)
    monkeypatch.setitem(sys.modules, "horovod", hvd)
    assert 6 < exact / bytes_of_a_step(compression=hvd.Compression.none) < 8
    monkeypatch.setenv("QSGD_BITS", "32")
    assert bytes_of_a_step(compression=hvd.Compression.none) == pytest.approx(exact, rel=0.02)


def test_environment_compresses_a_script_that_says_nothing(monkeypatch):
    monkeypatch.setenv("QSGD_BITS", "4")
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing that could be compressed")
    coded = bytes_of_a_step()
    monkeypatch.setenv("QSGD_BITS", "32")
    exact = bytes_of_a_step(compression=hvd.Compression.none)
    assert 6 < exact / coded < 8
    # Small tensors take another way through shared memory alone than fused with large ones.
    assert bytes_of_a_step() == pytest.approx(exact, rel=0.02)


def test_gradients_may_be_missing_on_some_ranks():
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Sum
    )
    before = [p.detach().clone() for p in model.parameters()]
    model[hvd.rank() % 2](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    users = [len(range(i, hvd.size(), 2)) for i in (0, 0, 1, 1)]
    for parameter, old, n in zip(model.parameters(), before, users, strict=True):
        assert torch.allclose(parameter, old - n)


def test_backward_passes_add_up_before_one_reduction():
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=3
    )
    for step in (1, 2):  # before its first step the ranks agree on which gradients are sparse
        count = hvd.communication_stats()["allreduces"]
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert torch.allclose(model.weight, before - step * 3 * (hvd.size() + 1) / 2)
    assert hvd.communication_stats()["allreduces"] - count == (1 if hvd.size() > 1 else 0)


def test_clipping_between_synchronize_and_step():
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.full((1, 3), 100.0 * (hvd.rank() + 1))).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose((before - model.weight).norm(), torch.tensor(1.0), atol=1e-5)


def test_scheduler_state_and_class_survive_the_wrapping():
    model = build(seed=1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.zero_grad()
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    again = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(again)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("stepped_on_root", [False, True])
def test_optimizer_state_restored_on_the_root_reaches_all(make, stepped_on_root):
    model = build(seed=1)
    optimizer = make(model.parameters())
    if stepped_on_root and hvd.rank() == 0:
        model(torch.randn(4, 40)).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125 if hvd.rank() == 0 else 7.0
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.125
    sums = [float(v.sum()) for s in optimizer.state.values() for v in s.values()
            if torch.is_tensor(v)]  # fmt: skip
    assert bool(sums) == (stepped_on_root or make is OPTIMIZERS["adagrad"])
    assert sums == hvd.broadcast_object(sums, 0)


def test_one_more_backward_than_promised_is_an_error_not_a_wrong_gradient():
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()


def expected_gradient():
    return hvd.size() * (hvd.size() + 1) / 2


def test_a_scheduler_built_before_wrapping_does_not_bypass_the_average():
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    before = model.weight.detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Sum)
    loss_of(model).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - expected_gradient())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Adasum])
def test_a_scheduler_built_before_wrapping_acts_on_a_loaded_state(op):
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
    hvd.broadcast_optimizer_state(optimizer)  # loads a state on all ranks but one
    for step in range(3):
        assert optimizer.param_groups[0]["lr"] == 0.5**step
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        scheduler.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert inner.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert torch.equal(model.weight.data, hvd.broadcast(model.weight.data, 0))


def test_parameters_unfrozen_or_added_later_are_averaged_too():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    extra = torch.nn.Parameter(torch.ones(1))
    model[0].requires_grad_(False)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [extra], "lr": 0.1})
        optimizer.zero_grad()
        (loss_of(model) * extra.sum()).backward()
        optimizer.step()
    for parameter in [*model.parameters(), extra]:
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


def test_parameters_frozen_later_stay_where_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), model.named_parameters()
    )
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)


def test_a_gradient_replaced_before_step_is_an_error_that_names_it():
    model, optimizer = linear()
    loss_of(model).backward()
    model.weight.grad = model.weight.grad.clamp(-9, 9)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="'weight' was replaced"):
            optimizer.step()


def test_a_gradient_changed_while_it_is_averaged_is_an_error_that_names_it():
    model, optimizer = linear()
    loss_of(model).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"'weight' was changed.*skip_synchronize"):
            optimizer.step()


def test_gradients_may_be_views_of_one_memory():
    model, optimizer = linear()
    before = model.weight.detach().clone()
    shared = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = shared.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    loss_of(model).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - expected_gradient())


def test_gradients_of_concatenated_parameters_share_memory_and_may_accumulate():
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    named = [(f"part{i}", p) for i, p in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 1.0), named)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        (torch.cat(parameters) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        expected = 1 - (step + 1) * (hvd.size() + 1) / 2
        assert all(torch.allclose(p, torch.full((4,), expected)) for p in parameters)


def test_a_step_skipped_after_synchronize_does_not_spoil_the_next():
    model, optimizer = linear()
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - expected_gradient())


def test_step_after_synchronize_averages_once_and_says_so():
    model, optimizer = linear()
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.synchronize()
    if hvd.size() > 1:
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        assert torch.allclose(model.weight, before - expected_gradient())


def test_a_second_optimizer_takes_a_model_over():
    model, optimizer = linear()
    del optimizer
    before = model.weight.detach().clone()
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    second = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    loss_of(model).backward()
    second.step()
    assert torch.allclose(model.weight, before - expected_gradient())
    del first


def test_two_optimizers_share_one_backward_pass():
    encoder, decoder = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    both = torch.nn.Sequential(encoder, decoder)
    hvd.broadcast_parameters(both.state_dict())
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in both
    ]
    loss_of(both).backward()
    for optimizer in optimizers:
        optimizer.step()
    for parameter in both.parameters():
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


def test_line_search_decides_alike_on_every_rank():
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict())
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=10),
        model.named_parameters(),
    )

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    for parameter in model.parameters():
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


class Halving:
    """A compressor of a user's own; what it sends shares memory with the gradient."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, context):
        return tensor * 0.5


def test_a_users_compressor_is_honoured_in_place_too():
    mine = torch.ones(5)
    hvd.allreduce_(mine, op=hvd.Sum, compression=Halving)
    assert torch.equal(mine, torch.full((5,), hvd.size() / 2))
    model, optimizer = linear(compression=Halving)
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    if hvd.size() > 1:
        assert torch.allclose(model.weight, before - expected_gradient() / 2)


def test_what_cannot_be_done_with_a_wrapped_optimizer_says_what_can():
    _, optimizer = linear()
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"qsgd\(bits=4\)"):
        linear(compression=4)
    with pytest.raises(ValueError, match="mpi4py communicator"):
        hvd.shutdown()
        hvd.init(comm=hvd)
    hvd.init()


def test_training_goes_on_after_a_batch_with_nan():
    model, optimizer = linear(compression=hvd.Compression.none)
    before = model.weight.detach().clone()
    if hvd.size() == 1:
        pytest.skip("one rank reduces nothing")
    x = torch.full((1, 3), float("nan") if hvd.rank() == 0 else 1.0)
    model(x).sum().backward()
    with pytest.raises(hvd.NonFiniteGradientError):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - expected_gradient())


def test_nan_gradient_is_named_on_every_rank():
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=8),
    )
    x = torch.ones(1, 64)
    if hvd.rank() == hvd.size() - 1:
        x[0, 3] = float("nan")
    model(x).sum().backward()
    if hvd.size() == 1:
        return
    with pytest.raises(hvd.NonFiniteGradientError, match=f"weight.*rank.* {hvd.size() - 1}"):
        optimizer.step()
