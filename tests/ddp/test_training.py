"""Several steps of training through the hook, in every way that DDP offers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.ddp import QSGDState, compress
from tests.ddp.models import batch, bytes_of, mlp, train, wrapped
from tests.ddp.ranks import Ranks, here


def ten_steps(group: dist.ProcessGroup, options: dict[str, Any]) -> bytes:
    model, _ = wrapped(group, 4, ddp=options)
    train(model, group.rank(), range(10))
    return bytes_of(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_replicas_stay_identical_and_runs_repeat(ranks: Ranks, options: dict[str, Any]) -> None:
    first, second = (ranks.run(ten_steps, options, size=4) for _ in range(2))
    assert len({*first, *second}) == 1


class Branches(nn.Module):
    """Takes one of two ways; the other gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList([nn.Linear(40, 60), nn.Linear(40, 60)])

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](x)


def unused(group: dist.ProcessGroup) -> tuple[bytes, bool]:
    branches = Branches().to(here())
    model = DistributedDataParallel(branches, process_group=group, find_unused_parameters=True)
    compress(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(
            batch(group.rank(), step), 0 if step < 2 else group.rank() % 2
        ).square().mean().backward()
        optimizer.step()
        if step == 1:
            untouched = torch.equal(Branches().ways[1].weight, branches.ways[1].weight.cpu())
    return bytes_of(model), untouched


def test_parameters_without_gradient_on_some_or_all_ranks(ranks: Ranks) -> None:
    answers = ranks.run(unused, size=3)
    assert len({weights for weights, _ in answers}) == 1
    assert all(untouched for _, untouched in answers)


def owed_by(state: QSGDState, name: str) -> torch.Tensor:
    return state.global_state_dict()["parameters"][name]["owed"]


def owed_over_unused_step(
    group: dist.ProcessGroup, options: dict[str, bool], to_none: bool
) -> tuple[float, float]:
    branches = Branches().to(here())
    model = DistributedDataParallel(
        branches, process_group=group, find_unused_parameters=True, **options
    )
    state = compress(model, 2)
    name, weight = "ways.1.weight", branches.ways[1].weight
    model(batch(group.rank(), 0), 1).square().mean().backward()
    before = owed_by(state, name)
    model.zero_grad(set_to_none=to_none)
    model(batch(group.rank(), 1), 0).square().mean().backward()
    paid = torch.zeros_like(before) if weight.grad is None else weight.grad.flatten().cpu()
    return float(before.norm()), float((before - paid - owed_by(state, name)).norm())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_a_step_without_a_gradient_on_any_rank_loses_nothing_that_is_owed(
    ranks: Ranks, options: dict[str, bool], to_none: bool
) -> None:
    for owed, lost in ranks.run(owed_over_unused_step, options, to_none, size=3):
        assert lost < 1e-6 * owed


def of_one_loss(group: dist.ProcessGroup) -> bytes:
    models = [wrapped(group, 4)[0] for _ in range(4)]
    for step in range(10):
        outputs = [model(batch(group.rank(), 10 * i + step)) for i, model in enumerate(models)]
        torch.stack(outputs).sum(0).square().mean().backward()
        for parameter in (p for model in models for p in model.parameters()):
            parameter.data.sub_(parameter.grad, alpha=0.05)
    return b"".join(map(bytes_of, models))


def test_several_models_exchange_buckets_at_once(ranks: Ranks) -> None:
    assert len({*ranks.run(of_one_loss, size=4)}) == 1


def accumulated(group: dist.ProcessGroup) -> tuple[bytes, int]:
    model, state = wrapped(group, 4)
    for step in range(3):
        with model.no_sync():
            model(batch(group.rank(), 2 * step)).square().mean().backward()
        model(batch(group.rank(), 2 * step + 1)).square().mean().backward()
    grads = b"".join(p.grad.cpu().numpy().tobytes() for p in model.parameters())
    return grads, state.state_dict()["parameters"]["0.weight"]["steps"]


def test_no_sync_accumulates_and_reduces_once(ranks: Ranks) -> None:
    answers = ranks.run(accumulated, size=2)
    assert answers[0] == answers[1]
    assert answers[0][1] == 3


def uneven(group: dist.ProcessGroup) -> bytes:
    model, _ = wrapped(group, 4)
    with Join([model]):
        train(model, group.rank(), range(2 + group.rank()))
    return bytes_of(model)


def test_ranks_with_fewer_inputs_join(ranks: Ranks) -> None:
    assert len(set(ranks.run(uneven, size=3))) == 1


def resumed(group: dist.ProcessGroup) -> tuple[bytes, bytes]:
    whole, _ = wrapped(group, 2)
    train(whole, group.rank(), range(6))
    first, state = wrapped(group, 2)
    train(first, group.rank(), range(3))
    file = io.BytesIO()
    torch.save({"model": first.module.state_dict(), "hook": state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    second, state = wrapped(group, 2)
    second.module.load_state_dict(saved["model"])
    state.load_state_dict(saved["hook"])
    train(second, group.rank(), range(3, 6))
    return bytes_of(whole), bytes_of(second)


def test_a_checkpoint_resumes_bit_for_bit(ranks: Ranks) -> None:
    for whole, again in ranks.run(resumed, size=3):
        assert whole == again


def owes(group: dist.ProcessGroup, saved: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return a global state after three steps, or what is owed after a saved one is taken up."""
    model, state = wrapped(group, 2)
    if saved is not None:
        state.load_state_dict(saved)
        taken = state.global_state_dict()
    train(model, group.rank(), range(3))
    return (state.global_state_dict(), None) if saved is None else (taken, state.state_dict())


def test_a_global_state_is_the_same_everywhere_and_fits_any_number_of_ranks(ranks: Ranks) -> None:
    states = [state for state, _ in ranks.run(owes, None, size=3)]
    for state in states[1:]:
        assert state["parameters"].keys() == states[0]["parameters"].keys()
        for name, saved in state["parameters"].items():
            assert saved["steps"] == 3
            if name in ("0.weight", "2.weight"):
                assert torch.equal(saved["owed"], states[0]["parameters"][name]["owed"])
                assert saved["owed"].abs().max() > 0
            else:
                assert "owed" not in saved
    for taken, own in ranks.run(owes, states[0], size=2):
        for name, saved in taken["parameters"].items():
            assert saved["steps"] == 3
            if "owed" in saved:
                assert torch.equal(saved["owed"], states[0]["parameters"][name]["owed"])
        assert own["parameters"]["0.weight"]["steps"] == 6


def applied(group: dist.ProcessGroup, saved: Any, steps: int) -> tuple[Any, Any]:
    """Return the sum of the gradients of some steps, and the state that they end with."""
    model, state = wrapped(group, 2)
    if saved is not None:
        state.load_state_dict(saved)
    total = 0
    for _ in range(steps):
        model.zero_grad()
        model(batch(0, 0)).square().mean().backward()  # the same on all ranks
        total = total + model.module[0].weight.grad.double()
    return total.cpu(), state.global_state_dict()


def test_what_a_run_owes_is_paid_on_another_number_of_ranks(ranks: Ranks) -> None:
    exact = mlp()
    exact(batch(0, 0)).square().mean().backward()
    first, saved = ranks.run(applied, None, 7, size=3)[0]
    second, left = ranks.run(applied, saved, 5, size=4)[0]
    owed = left["parameters"]["0.weight"]["owed"].double().view_as(first)
    wanted = exact[0].weight.grad.double() * 12
    assert saved["parameters"]["0.weight"]["owed"].abs().max() > 1e-4
    assert torch.allclose(first + second + owed, wanted, rtol=1e-4, atol=1e-6)


def loaded_and_saved(group: dist.ProcessGroup) -> str:
    model, state = wrapped(group, 2)
    train(model, group.rank(), range(2))
    _, again = wrapped(group, 2)
    again.load_state_dict(state.state_dict())
    with pytest.raises(UsageError) as refused:
        again.global_state_dict()
    return str(refused.value)


def test_a_ranks_own_state_becomes_global_only_after_a_step(ranks: Ranks) -> None:
    for text in ranks.run(loaded_and_saved, size=2):
        assert "take a step first" in text


def feedback_error(group: dist.ProcessGroup, feedback: bool) -> float:
    # The same gradient at every step: what was applied in sum must come back to it.
    model, _ = wrapped(group, 2, error_feedback=feedback)
    applied, steps = 0, 40
    for _ in range(steps):
        model.zero_grad()
        model(batch(group.rank(), 0)).square().mean().backward()
        applied = applied + model.module[0].weight.grad.double()
    exact = wrapped(group, 8, rules="*=32")[0]
    exact(batch(group.rank(), 0)).square().mean().backward()
    wanted = exact.module[0].weight.grad.double() * steps
    return float((applied - wanted).norm() / wanted.norm())


def test_error_feedback_survives_rebuilt_buckets_and_pays_back_what_coding_lost(
    ranks: Ranks,
) -> None:
    with_feedback = ranks.run(feedback_error, True, size=3)[0]
    without = ranks.run(feedback_error, False, size=3)[0]
    # Unbiased noise falls with the root of the steps, what is owed at last with the steps.
    assert with_feedback < 0.5 * without


def compiled(group: dist.ProcessGroup) -> bytes:
    # torch.compile itself refuses buckets below the first one's megabyte.
    model, _ = wrapped(group, 4, ddp={"bucket_cap_mb": 25})
    train(torch.compile(model, backend="aot_eager"), group.rank(), range(4))
    return bytes_of(model)


def test_compiled_models_train(ranks: Ranks) -> None:
    answers = ranks.run(compiled, size=2)
    assert answers[0] == answers[1]


def learned(group: dist.ProcessGroup, bits: int | None, seed: int) -> float:
    torch.manual_seed(seed)
    way = torch.randn(40, 9, generator=torch.Generator().manual_seed(7)).to(here())
    module = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 9)).to(here())
    model = DistributedDataParallel(module, process_group=group)
    if bits is not None:
        compress(model, bits, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(150):
        x = batch(group.rank(), 100 * seed + step, count=32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x @ way).argmax(1)).backward()
        optimizer.step()
    x = batch(99, 12345, count=1000)
    return float(nn.functional.cross_entropy(module(x), (x @ way).argmax(1)))


def test_a_classifier_learns_within_the_noise_of_float32(ranks: Ranks) -> None:
    plain, coded = ([ranks.run(learned, b, s, size=2)[0] for s in range(3)] for b in (None, 4))
    spread = max(plain) - min(plain)
    assert sum(coded) / 3 <= sum(plain) / 3 + 2 * spread
    assert max(coded) < 1.0  # nine classes: 2.2 before training
