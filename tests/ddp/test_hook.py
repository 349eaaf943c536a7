"""One backward pass through the hook, against the exact mean."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc.compression import KINDS
from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.attached import Attached
from qsgd_hpc.torch.ddp import QSGDState, compress, qsgd_hook
from tests.ddp.models import batch, bytes_of, exact_mean, gradient, mlp, train, wrapped
from tests.ddp.ranks import Ranks, here


def reduced(group: dist.ProcessGroup, bits: int, settings: dict[str, Any]) -> Any:
    model, _ = wrapped(group, bits, **settings)
    model(batch(group.rank(), 0)).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    exact = exact_mean(group, 0)
    wanted = exact.split([g.numel() for g in grads])
    errors = [
        float((g.flatten() - w).square().sum() / w.square().sum())
        for g, w in zip(grads, wanted, strict=True)
    ]
    return gradient(model).cpu().numpy().tobytes(), errors


# Twice the variance of one code, of the worst of these distributions: QSGD.md, "Error of the mean".
BOUNDS = {8: 2 * 4.9e-4, 4: 2 * 0.154}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_are_as_close_to_the_mean_as_two_codes_allow_and_vectors_exact(
    ranks: Ranks, size: int, bits: int
) -> None:
    answers = ranks.run(reduced, bits, {"error_feedback": False}, size=size)
    assert len({grads for grads, _ in answers}) == 1, "replicas differ"
    for errors in (errors for _, errors in answers):
        for matrix in errors[:4:2]:  # the last matrix is below min_elements
            assert matrix <= BOUNDS[bits]
            assert size == 1 or matrix > 1e-7, "nothing was compressed"
        assert max(errors[1::2] + errors[4:]) < 1e-10


def test_rules_by_name_choose_bits(ranks: Ranks) -> None:
    rules = {"rules": "2.weight=32, 0.weight=8", "error_feedback": False}
    for _, errors in ranks.run(reduced, 2, rules, size=3):
        assert 1e-7 < errors[0] <= BOUNDS[8]
        assert max(errors[1:]) < 1e-10


@pytest.mark.parametrize("scheme", [name for name, kind in KINDS.items() if not kind.varies])
def test_every_scheme_gives_the_same_bits_on_all_ranks(ranks: Ranks, scheme: str) -> None:
    answers = ranks.run(reduced, None, {"scheme": scheme}, size=3)
    assert len({grads for grads, _ in answers}) == 1
    assert 1e-7 < answers[0][1][0] < 4  # two codes of 1 or 2 bits


def first_steps_exact(group: dist.ProcessGroup) -> list[float]:
    model, _ = wrapped(group, 4, start_step=2)
    errors = []
    for _ in range(3):
        model.zero_grad()
        model(batch(group.rank(), 0)).square().mean().backward()
        exact = exact_mean(group, 0)
        errors.append(float((gradient(model) - exact).square().sum() / exact.square().sum()))
    return errors


def test_compression_begins_at_start_step(ranks: Ranks) -> None:
    for errors in ranks.run(first_steps_exact, size=2):
        assert max(errors[:2]) < 1e-10 < 1e-5 < errors[2]


def half_gradients(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[bytes, float]:
    model = DistributedDataParallel(mlp().to(dtype), process_group=group)
    compress(model, 8)
    model(batch(group.rank(), 0).to(dtype)).float().square().mean().backward()
    exact = exact_mean(group, 0)
    got = gradient(model)
    assert got.dtype == dtype
    error = (got.double() - exact).square().sum() / exact.square().sum()
    return got.view(torch.uint8).cpu().numpy().tobytes(), float(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types_are_averaged(ranks: Ranks, dtype: torch.dtype) -> None:
    answers = ranks.run(half_gradients, dtype, size=3)
    assert len({grads for grads, _ in answers}) == 1
    # The model itself is computed in 16 bits: bfloat16 alone errs by some 2^-8 per operation.
    assert answers[0][1] < (2e-3 if dtype == torch.bfloat16 else BOUNDS[8])


def infinite_gradient(group: dist.ProcessGroup) -> tuple[list[bool], bool, bytes]:
    model, state = wrapped(group, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler(here().type, init_scale=1024.0)
    state.scaler = scaler
    applied = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(here().type, dtype=torch.bfloat16):
            loss = model(batch(group.rank(), step)).float().square().mean()
        if step == 1 and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = bytes_of(model)
        scaler.step(optimizer)
        scaler.update()
        applied.append(bytes_of(model) != before)
    saved = state.state_dict()["parameters"].values()
    finite = all(bool(s["residual"].isfinite().all()) for s in saved if "residual" in s)
    return applied, finite, bytes_of(model)


def test_infinity_on_one_rank_skips_the_step_on_all_and_leaves_residuals_finite(
    ranks: Ranks,
) -> None:
    answers = ranks.run(infinite_gradient, size=3)
    assert len({weights for *_, weights in answers}) == 1
    for applied, finite, _ in answers:
        assert applied == [True, False, True, True]
        assert finite


def planned(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the number of parameters in all plans, after DDP has rebuilt its buckets."""
    model, state = wrapped(group, 4)
    train(model, group.rank(), range(3))
    plans = [*state._plans, *state._device_plans]
    return len(plans), sum(len(parameters) for _, _, *parameters in plans)


def test_rebuilt_buckets_leave_no_memory_of_earlier_ones(ranks: Ranks) -> None:
    for plans, parameters in ranks.run(planned, size=2):
        assert plans > 1
        assert parameters == 6


def reads_of_the_scale(group: dist.ProcessGroup) -> tuple[int, int]:
    scaler = torch.amp.GradScaler(here().type)
    model, state = wrapped(group, 4, scaler=scaler)
    get_scale = mock.Mock(return_value=1024.0)
    with mock.patch.object(scaler, "get_scale", get_scale):
        train(model, group.rank(), range(3))
    return get_scale.call_count, len(state.arrivals)


def test_the_scale_is_read_once_per_backward_pass(ranks: Ranks) -> None:
    """Reading it waits for the device."""
    for reads, buckets in ranks.run(reads_of_the_scale, size=2):
        assert reads == 3
        assert buckets > 1 or ranks.place == "device"


class Overflowing(nn.Module):
    """Two tensors: the gradient of one is infinite in float16 until the scale is 2^9."""

    def __init__(self) -> None:
        super().__init__()
        self.finite = nn.Parameter(torch.zeros(8, 64))
        self.overflowing = nn.Parameter(torch.zeros(8, 64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.overflowing.half().float().sum() * 100 + (self.finite * gradient).sum()


def skipped_steps(group: dist.ProcessGroup) -> tuple[float, bool]:
    gradient = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(here())
    model = DistributedDataParallel(Overflowing().to(here()), process_group=group)
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**16)
    state = compress(model, 2, min_elements=0, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(9):
        optimizer.zero_grad()
        scaler.scale(model(gradient)).backward()
        scaler.step(optimizer)
        scaler.update()
    owed = state.global_state_dict()["parameters"]["finite"]["owed"].reshape(8, 64)
    total = owed / scaler.get_scale() - model.module.finite.detach().cpu()
    return scaler.get_scale(), torch.allclose(total, 2 * gradient.cpu(), atol=1e-4)


def test_skipped_steps_leave_nothing_to_the_steps_that_follow(ranks: Ranks) -> None:
    assert ranks.run(skipped_steps, size=2) == [(2.0**9, True)] * 2


def skipped_step_of_one_optimizer(group: dist.ProcessGroup) -> list[bool]:
    gradient = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(here())
    model = DistributedDataParallel(Overflowing().to(here()), process_group=group)
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**10)
    state = compress(model, 2, min_elements=0, scaler=scaler)
    optimizers = [torch.optim.SGD([each], 1.0) for each in model.module.parameters()]
    for _ in range(2):
        model.zero_grad()
        scaler.scale(model(gradient)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    expected = {"finite": 2 * gradient, "overflowing": torch.full((8, 64), 100.0)}
    complete = [scaler.get_scale() == 2.0**9]
    for name, parameter in model.module.named_parameters():
        owed = state.global_state_dict()["parameters"][name]["owed"].reshape(8, 64)
        total = owed / scaler.get_scale() - parameter.detach().cpu()
        complete.append(torch.allclose(total, expected[name].cpu(), atol=1e-3))
    return complete


def test_a_skipped_step_leaves_the_residuals_of_other_optimizers(ranks: Ranks) -> None:
    """The total of steps and residuals is that of the gradients: none of them is lost."""
    assert ranks.run(skipped_step_of_one_optimizer, size=2) == [[True] * 3] * 2


def residuals_of(group: dist.ProcessGroup, default: str) -> tuple[set[torch.dtype], float, float]:
    torch.set_default_dtype(getattr(torch, default))
    try:
        model, state = wrapped(group)
        for _ in range(5):
            model.zero_grad()
            model(batch(group.rank(), 0)).square().mean().backward()
        slots = state._memory._slots.values()
        kept = [r for slot in slots for r in slot.residuals().values()]
        owed = torch.cat([r.double().flatten() for r in kept]).norm()
        return {r.dtype for r in kept}, float(owed), float(gradient(model).double().norm())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("default", ["float64", "bfloat16"])
def test_residuals_are_float32_whatever_the_default_type(ranks: Ranks, default: str) -> None:
    for dtypes, owed, size in ranks.run(residuals_of, default, size=2):
        assert dtypes == {torch.float32}
        assert 1e-3 * size < owed < size


def first_gradient(group: dist.ProcessGroup, resumed_scale: float | None) -> float:
    """Return the relative error of the first gradient after a checkpoint is loaded.

    Args:
        group: the ranks.
        resumed_scale: the scale of the scaler that goes on; None: there is none.
    """

    def backward(model: nn.Module, scaler: torch.amp.GradScaler) -> torch.Tensor:
        model.zero_grad()
        scaler.scale(model(batch(group.rank(), 0)).square().mean()).backward()
        return gradient(model).double() / scaler.get_scale()

    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**20)
    model, state = wrapped(group, scaler=scaler)
    for _ in range(5):
        backward(model, scaler)
    saved = state.state_dict()
    scaled = resumed_scale is not None
    later = torch.amp.GradScaler(here().type, init_scale=resumed_scale or 1.0, enabled=scaled)
    model, state = wrapped(group, scaler=later if scaled else None)
    state.load_state_dict(saved)
    exact = exact_mean(group, 0)
    return float((backward(model, later) - exact).norm() / exact.norm())


def test_a_loaded_state_follows_the_scale_of_another_scaler(ranks: Ranks) -> None:
    same, other, none = (ranks.run(first_gradient, s, size=2)[0] for s in (2.0**20, 2.0**10, None))
    assert other == pytest.approx(same, rel=1e-3)
    assert none == pytest.approx(same, rel=1e-3)


def attached_to_several(group: dist.ProcessGroup) -> list[float]:
    """Return the relative error of the first gradient of each model that has one callback."""
    attached, errors = Attached(bits=8), []
    for _ in range(2):
        model = DistributedDataParallel(mlp(), process_group=group)
        for step in range(3):
            attached.attach(model)  # the Trainer does so at each train()
            model.zero_grad()
            # At last the gradients explode, and with them what is owed.
            (model(batch(group.rank(), step)).square().mean() * 1000.0**step).backward()
            if step == 0:
                exact = exact_mean(group, 0)
                errors.append(float((gradient(model).double() - exact).norm() / exact.norm()))
    return errors


def test_a_callback_keeps_what_is_owed_with_its_model(ranks: Ranks) -> None:
    for errors in ranks.run(attached_to_several):
        assert max(errors) < 0.05


def sparse_embedding(group: dist.ProcessGroup) -> torch.Tensor:
    torch.manual_seed(0)
    table = nn.Embedding(50, 40, sparse=True).to(here())
    model = DistributedDataParallel(table, process_group=group)
    model.register_comm_hook(QSGDState(group), qsgd_hook)
    model(torch.tensor([group.rank(), 7], device=here())).sum().backward()
    return table.weight.grad.to_dense()[:, 0].tolist()


def test_sparse_gradients_travel_as_they_are(ranks: Ranks) -> None:
    if ranks.place == "device":
        pytest.skip("NCCL reduces no sparse tensors; torch says so itself")
    wanted = [0.5, 0.5, *[0.0] * 5, 1.0, *[0.0] * 42]
    assert ranks.run(sparse_embedding, size=2) == [wanted, wanted]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(30, 50, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.by * x).real.sum()


def complex_gradient(group: dist.ProcessGroup) -> bool:
    by_rank = [torch.arange(1500.0).reshape(30, 50) * (1 + r + 1j) for r in range(group.size())]
    model = DistributedDataParallel(Turned().to(here()), process_group=group)
    compress(model, 4)
    model(by_rank[group.rank()].to(here())).backward()
    mean = torch.stack(by_rank).mean(0).conj()
    return torch.allclose(model.module.by.grad.cpu(), mean)


@pytest.mark.skipif(
    torch.__version__ < "2.10", reason="DDP of this PyTorch averages them wrongly with any hook"
)
def test_complex_gradients_are_averaged_exactly(ranks: Ranks) -> None:
    assert ranks.run(complex_gradient, size=2) == [True, True]


def outside_its_group(group: dist.ProcessGroup) -> str:
    model = DistributedDataParallel(mlp(), process_group=group)
    model.register_comm_hook(QSGDState(dist.GroupMember.NON_GROUP_MEMBER), qsgd_hook)
    with pytest.raises(Exception, match="is not in the process group") as raised:
        model(batch(group.rank(), 0)).square().mean().backward()
    return str(raised.value)


def test_a_state_for_a_group_without_this_rank_is_refused(ranks: Ranks) -> None:
    assert "rank 1 is not" in ranks.run(outside_its_group, size=2)[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 9}, "bits=9"),
        ({"bits": 0}, "bits=0"),
        ({"bits": "auto"}, "choose 1 to 8, or use"),
        ({"scheme": "elias"}, "QSGDState: elias codes have a variable length"),
        ({"scheme": "qsdg"}, "choose one of qsgd"),
        ({"bukket_size": 512}, "bukket_size"),
        ({"bucket_size": 100}, "bucket_size=100"),
        ({"norm": "l3"}, "norm='l3'"),
        ({"scheme": "terngrad", "bits": 4}, "terngrad takes"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        QSGDState(**settings)


def not_ddp(group: dist.ProcessGroup) -> list[str]:
    model = mlp()
    refusals = []
    for make in (
        lambda: compress(model),
        lambda: compress(DistributedDataParallel(model, process_group=group), 32),
        lambda: qsgd_hook(group, FirstBucket(list(model.parameters()))),
    ):
        with pytest.raises(UsageError) as raised:
            make()
        refusals.append(str(raised.value))
    return refusals


def test_what_compress_cannot_use_is_named(ranks: Ranks) -> None:
    bare, bits, state = ranks.run(not_ddp, size=2)[0]
    assert "compress() got Sequential: pass the model that DistributedDataParallel" in bare
    assert "compress(bits=32): choose 1 to 8" in bits
    assert "write model.register_comm_hook(QSGDState(bits=4), qsgd_hook)" in state


def pickled(group: dist.ProcessGroup) -> bool:
    model, state = wrapped(group, 4)
    train(model, group.rank(), range(2))
    again = pickle.loads(pickle.dumps(state))
    old, new = state.state_dict()["parameters"], again.state_dict()["parameters"]
    same = all(torch.equal(old[name]["residual"], new[name]["residual"]) for name in ("0.weight",))
    return same and old.keys() == new.keys() and again.compression == state.compression


def test_a_state_can_be_pickled(ranks: Ranks) -> None:
    assert ranks.run(pickled, size=2) == [True, True]


def unpickled(group: dist.ProcessGroup) -> tuple[str, bytes, bytes]:
    whole, _ = wrapped(group, 2)
    train(whole, group.rank(), range(4))
    first, state = wrapped(group, 2)
    train(first, group.rank(), range(2))
    again = pickle.loads(pickle.dumps(state))
    again.process_group = group
    second = DistributedDataParallel(first.module, process_group=group, bucket_cap_mb=0.01)
    second.register_comm_hook(again, qsgd_hook)
    with pytest.raises(UsageError) as refusal:
        again.reduce(FirstBucket(list(first.module.parameters())))
    again.name_parameters(second.module.named_parameters())
    train(second, group.rank(), range(2, 4))
    return str(refusal.value), bytes_of(whole), bytes_of(second)


class FirstBucket:
    """What DDP passes to a hook."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.index = lambda: 0
        self.parameters = lambda: parameters
        self.buffer = lambda: torch.cat([p.detach().flatten() for p in parameters])


def test_a_pickled_state_needs_the_names_it_had(ranks: Ranks) -> None:
    for refusal, whole, again in ranks.run(unpickled, size=2):
        assert "state.name_parameters(model.module.named_parameters())" in refusal
        assert whole == again
