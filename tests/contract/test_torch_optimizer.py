"""What ``hvd.DistributedOptimizer`` promises for every optimizer of torch, on any number of ranks.

Runs as plain ``pytest`` on one rank, and under ``qsgd-hpc run -np N python -m pytest`` on more.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import qsgd_hpc.torch as hvd
from tests.contract.training import linear, loss_of, needs_ranks, replicas_are_identical, rows

pytestmark = pytest.mark.usefixtures("torch_job")


SHIPPED = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


def dense_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def make(kind, model):
    if kind is torch.optim.LBFGS:
        return kind(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    return kind(model.parameters(), lr=0.01)


def train(model, optimizer, shares, step):
    x, y = rows(shares, step)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("kind", [k for k in SHIPPED if k is not torch.optim.SparseAdam])
def test_every_optimizer_equals_one_process_with_the_whole_batch(kind):
    model = dense_model().double()
    serial = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(make(kind, model), model.named_parameters())
    reference = make(kind, serial)
    assert isinstance(optimizer, kind)
    for step in range(4):
        train(model, optimizer, [hvd.rank()], step)
        train(serial, reference, range(hvd.size()), step)
        assert replicas_are_identical(model)
    # Muon computes in bfloat16, where a last bit of the gradient can turn a rounding.
    tolerance = 2e-3 if kind.__name__ == "Muon" else 1e-7
    for mine, expected in zip(model.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=tolerance)


def test_predividing_splits_the_average_and_leaves_it():
    model, optimizer = linear(op=hvd.Average, gradient_predivide_factor=hvd.size() / 2)
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.tensor((hvd.size() + 1) / 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({"gradient_predivide_factor": 0.0}, "more than 0"),
        ({"op": hvd.Max}, "choose hvd"),
        ({"num_groups": 1, "groups": 1}, "not both"),
        ({"groups": -1}, "0 \\(none\\) or more"),
        ({"groups": [[torch.ones(1)]]}, "does not have"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ],
)
def test_arguments_that_cannot_be_are_answered_with_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        linear(**{"op": hvd.Average, **arguments})


def test_parameters_without_names_are_answered_with_the_remedy():
    parameters = list(nn.Linear(3, 1).parameters())
    with pytest.raises(ValueError, match=r"not model\.parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), parameters)
    with pytest.raises(ValueError, match="or a dict"):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), {"weight": parameters[0]})


@pytest.mark.parametrize("what", [None, torch.optim.SGD, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(what):
    with pytest.raises(ValueError, match="takes an optimizer"):
        hvd.DistributedOptimizer(what)


class Halving:
    """A compressor of a user: sends float16 halves, and doubles what comes back."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).half(), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return (tensor * 2).to(context)


@pytest.mark.parametrize("groups", [0, 1])
def test_a_users_compressor_is_honoured(groups):
    model, optimizer = linear(compression=Halving, groups=groups)
    before = model.weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    assert model.weight.grad.dtype == torch.float32
    total = hvd.size() * (hvd.size() + 1) / 2
    assert torch.allclose(before - model.weight, torch.tensor(total))


@needs_ranks(2)
def test_training_goes_on_when_the_job_has_been_formed_anew():
    model, optimizer = linear()
    before = model.weight.detach().clone()
    loss_of(model).backward()  # its reduction ends with the job
    hvd.shutdown()
    hvd.init()
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    total = hvd.size() * (hvd.size() + 1)
    assert torch.allclose(before - model.weight, torch.tensor(float(total)))


def layers(**arguments):
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), **arguments)


@pytest.mark.parametrize("how", [{"num_groups": 2}, {"groups": 2}, {"groups": 9}, "lists"])
def test_groups_change_no_result(how):
    plain, plain_optimizer = layers(op=hvd.Sum)
    if how == "lists":
        inner = torch.optim.SGD((model := copy.deepcopy(plain)).parameters(), lr=1.0)
        lists = [[model[0].weight, model[4].weight], [model[2].weight]]
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), op=hvd.Sum, groups=lists
        )
    else:
        model, optimizer = layers(op=hvd.Sum, **how)
    for _ in range(2):
        for net, tool in [(plain, plain_optimizer), (model, optimizer)]:
            tool.zero_grad()
            # Layer 3 is unused on some ranks, layer 1 on all.
            used = [0, 2, 4] + [3] * (hvd.rank() % 2)
            sum(net[i](torch.ones(1, 4)).sum() for i in used).backward()
            tool.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_group_with_a_frozen_member_is_reduced_without_it():
    model, optimizer = layers(op=hvd.Sum, groups=1)
    before = [p.detach().clone() for p in model.parameters()]
    model[1].weight.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        sum(layer(torch.ones(1, 4)).sum() for layer in model).backward()
        optimizer.step()
    for i, (parameter, old) in enumerate(zip(model.parameters(), before, strict=True)):
        assert torch.allclose(parameter, old - (0 if i == 1 else 2 * hvd.size()))


def two_parts(lr, **arguments):
    """Return two layers and an optimizer that would change the second with a gradient of zeros."""
    torch.manual_seed(3)
    parts = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))
    if arguments.pop("listed", False):
        arguments["groups"] = [[part.weight for part in parts]]
    inner = torch.optim.AdamW(parts.parameters(), lr=lr, weight_decay=0.5)
    return parts, hvd.DistributedOptimizer(inner, parts.named_parameters(), **arguments)


UNUSED = {
    "separate": {},
    "one group": {"groups": 1},
    "lists": {"listed": True},
    "passes": {"backward_passes_per_step": 2},
    "coded": {"compression": hvd.Compression.qsgd(bits=4, min_elements=1)},
}


@pytest.mark.parametrize("synchronize", [False, True])
@pytest.mark.parametrize("how", UNUSED.values(), ids=UNUSED)
def test_a_parameter_that_no_rank_has_used_so_far_is_left_alone(how, synchronize):
    """As in one process: weight decay does not change it, and it has no state."""
    parts, optimizer = two_parts(0.1, **how)
    alone = copy.deepcopy(parts[1])
    own = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5)
    passes = how.get("backward_passes_per_step", 1)
    for step in range(6):
        optimizer.zero_grad()
        # The last rank uses the second part in one step; then no rank does.
        using = step == 3 and hvd.rank() == hvd.size() - 1
        for _ in range(passes):
            (loss_of(parts[0]) + (parts[1].weight.sum() if using else 0.0)).backward()
        if synchronize:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if step >= 3 and not (step > 3 and hvd.size() == 1):  # one rank leaves it without zeros
            alone.weight.grad = torch.full((1, 3), passes / hvd.size() if step == 3 else 0.0)
            own.step()
        assert (parts[1].weight in optimizer.state) == (step >= 3)
        assert replicas_are_identical(parts)
        assert torch.allclose(parts[1].weight, alone.weight, atol=1e-3)
        assert step >= 3 or torch.equal(parts[1].weight, alone.weight)


@pytest.mark.parametrize("groups", [0, 1])
def test_a_parameter_whose_gradients_were_all_discarded_is_left_alone(groups):
    parts, optimizer = two_parts(0.1, backward_passes_per_step=2, groups=groups)
    before = parts[1].weight.detach().clone()
    sum(map(loss_of, parts)).backward()
    parts.zero_grad()
    for _ in range(2):
        loss_of(parts[0]).backward()
    optimizer.step()
    assert parts[1].weight.grad is None
    assert torch.equal(parts[1].weight, before)


def test_optimizers_that_share_a_parameter_leave_it_alone_until_a_rank_uses_it():
    parts, first = two_parts(0.1)
    before = parts[1].weight.detach().clone()
    loss_of(parts[0]).backward()
    # The new one completes the gradients that the first one has begun.
    second = hvd.DistributedOptimizer(torch.optim.SGD(parts.parameters(), lr=1.0), op=hvd.Sum)
    for optimizer in (second, first):
        assert parts[1].weight.grad is None
        parts.zero_grad()
        loss_of(parts[0]).backward()
        optimizer.step()
    assert torch.equal(parts[1].weight, before)
    parts.zero_grad()
    (loss_of(parts[0]) + (parts[1].weight.sum() if hvd.rank() == 0 else 0.0)).backward()
    second.step()
    assert torch.equal(parts[1].weight, before - 1.0)


@needs_ranks(3)
def test_a_process_set_leaves_alone_what_only_other_ranks_use():
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    parts, optimizer = two_parts(0.1, process_set=pair)
    before = parts[1].weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        sum(loss_of(part) for part in parts[: 1 if pair.included() else 2]).backward()
        optimizer.step()
    assert torch.equal(parts[1].weight, before) == pair.included()
    hvd.shutdown()
    hvd.init()


@needs_ranks(2)
def test_a_process_set_of_an_earlier_job_is_refused():
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    model, optimizer = linear(process_set=first)
    loss_of(model).backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    loss_of(model).backward()
    with pytest.raises(ValueError, match="not registered"):
        optimizer.step()


def test_passes_per_step_may_change_between_steps():
    model, optimizer = linear(backward_passes_per_step=2)
    before = model.weight.detach().clone()
    for passes in (2, 3, 4):
        if passes < 4:
            optimizer.set_backward_passes_per_step(passes)
        else:
            optimizer.backward_passes_per_step = passes
        assert optimizer.backward_passes_per_step == passes
        for _ in range(passes):
            loss_of(model).backward()
        if hvd.size() > 1:
            with pytest.raises(ValueError, match="after step"):
                optimizer.set_backward_passes_per_step(1)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(
        before - model.weight, torch.tensor(9 * hvd.size() * (hvd.size() + 1) / 2)
    )


def test_a_loaded_state_leaves_hooks_and_later_groups_of_parameters_alone():
    model, optimizer = linear()
    optimizer.load_state_dict(optimizer.state_dict())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    added = nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(added.state_dict())
    before = added.weight.detach().clone()
    optimizer.add_param_group({"params": added.parameters()})
    (loss_of(model) + loss_of(added)).backward()
    optimizer.step()
    assert calls == [1]
    assert torch.allclose(before - added.weight, torch.tensor(hvd.size() * (hvd.size() + 1) / 2))


def test_complex_parameters_are_averaged():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    ((1 + hvd.rank()) * weight.real + 2 * hvd.rank() * weight.imag).sum().backward()
    optimizer.step()
    ranks = sum(range(hvd.size()))
    assert torch.allclose(weight, torch.tensor(-complex(hvd.size() + ranks, 2 * ranks)))


def test_gradients_that_autograd_conjugates_lazily_are_averaged():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for step in (1, 2):
        optimizer.zero_grad()
        factor = torch.full((3,), complex(1, hvd.rank()))
        term = weight.conj() * factor if hvd.rank() < 2 else weight * factor.conj()
        term.real.sum().backward()
        optimizer.step()
        ranks = sum(range(hvd.size()))
        assert torch.allclose(weight, torch.tensor(-step * complex(hvd.size(), ranks)))


class WithoutArgument(torch.optim.SGD):
    """An optimizer whose zero_grad takes no argument, as apex's FusedAdam."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("kind", "arguments"), [(WithoutArgument, {}), (torch.optim.SGD, {"set_to_none": False})]
)
def test_zero_grad_passes_its_arguments_on(kind, arguments):
    model = dense_model().double()
    optimizer = hvd.DistributedOptimizer(make(kind, model), model.named_parameters())
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), [0], 0)
    optimizer.synchronize()
    optimizer.zero_grad(**arguments)
    assert not any(p.grad.any() for p in model.parameters())


def test_a_closure_may_return_no_loss():
    model, optimizer = linear()
    before = model.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss_of(model).backward()

    assert optimizer.step(closure) is None
    total = hvd.size() * (hvd.size() + 1) / 2
    assert torch.allclose(model.weight, before - total)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own compiler
def test_a_compiled_model_and_step_train_alike():
    model = dense_model()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    tools = [
        hvd.DistributedOptimizer(torch.optim.Adam(p.parameters(), lr=0.1), p.named_parameters())
        for p in (model, plain)
    ]
    steps = [torch.compile(tools[0].step, backend="aot_eager"), tools[1].step]
    for step in range(2):
        x, y = rows([hvd.rank()], step, torch.float32)
        for net, optimizer, do in zip((compiled, plain), tools, steps, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            do()
    assert replicas_are_identical(model)
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)


@needs_ranks(2)
def test_gradients_are_handed_over_during_the_backward_pass():
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB: small ones wait for company
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    before = hvd.communication_stats()["allreduces"]
    model(torch.ones(1, 1024)).sum().backward()
    while hvd.communication_stats()["allreduces"] == before:
        pass  # the engine is at work without anybody waiting for it
    optimizer.step()
