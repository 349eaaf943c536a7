"""FSDP2 with coded gradients and weights, against the exact mean and exact weights."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import gpu
from qsgd_hpc.torch.ddp.measured import watch_shards
from qsgd_hpc.torch.fsdp import collectives, quantize_fsdp
from tests.ddp.models import batch, mlp
from tests.ddp.ranks import SIZE, here
from tests.ddp.ranks import Ranks as AnyRanks

# The largest variance of one code, relative to what is coded: QSGD.md, "Error of the mean".
BOUNDS = {8: 4.9e-4, 4: 0.154}


@dataclass(frozen=True)
class Ranks:
    """Ranks whose shards are coded by the kernels of this library, or with "none" on the host."""

    ranks: AnyRanks
    library: str

    def run(self, work: Callable[..., Any], *args: Any, size: int = SIZE) -> list[Any]:
        return self.ranks.run(coded_by, self.library, work, *args, size=size)


@pytest.fixture(params=["processor", "kernels"])
def ranks(request: pytest.FixtureRequest, ranks: AnyRanks) -> Ranks:
    if request.param == "processor":
        return Ranks(ranks, "none")
    twin = ranks.place == "host"
    return Ranks(ranks, str(request.getfixturevalue("twin") if twin else gpu.library()))


def coded_by(group: dist.ProcessGroup, library: str, work: Callable[..., Any], *args: Any) -> Any:
    """Choose the kernels, and see to it that the other way is not taken."""
    other = "DeviceCodec" if library == "none" else "HostCodec"
    refuse = mock.patch.object(collectives, other, side_effect=AssertionError(other))
    with mock.patch.dict(os.environ, QSGD_GPU_LIBRARY=library), refuse:
        return work(group, *args)


class Net(nn.Module):
    """Parameters of each kind within one module: matrices, vectors, a matrix that is small."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 40))
        self.body = nn.Sequential(nn.Linear(40, 101), nn.LayerNorm(101), nn.Linear(101, 60))
        self.side = nn.Linear(40, 60, bias=False)
        self.head = nn.Linear(60, 9)

    def forward(self, x: torch.Tensor, *, aside: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.body(x * self.scale))
        if aside:
            hidden = hidden + self.side(x)
        return self.head(hidden)


def net() -> Net:
    torch.manual_seed(3)
    model = Net()
    nn.init.normal_(model.body[1].weight)  # else ones and zeros, which any code keeps
    nn.init.normal_(model.body[1].bias)
    return model.to(here())


def sharded(group: dist.ProcessGroup, **options: Any) -> Net:
    model = net()
    mesh = DeviceMesh.from_group(group, here().type)
    fully_shard(model.body, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def loss(model: nn.Module, rank: int, step: int = 0, **options: Any) -> torch.Tensor:
    return model(batch(rank, step), **options).square().mean()


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad).double() for name, p in model.named_parameters()}


def exact_gradients(model: Net, ranks: int, **options: Any) -> dict[str, torch.Tensor]:
    for rank in range(ranks):
        (loss(model, rank, **options) / ranks).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def relative(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    return {n: float((got[n] - w).square().sum() / w.square().sum()) for n, w in wanted.items()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a forward pass would compute with."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return seen


CODED = ("body.0.weight", "body.2.weight", "side.weight")


def gradient_errors(group: dist.ProcessGroup, bits: int, settings: Any) -> dict[str, float]:
    model = sharded(group)
    quantize_fsdp(model, bits, None, **settings)
    loss(model, group.rank()).backward()
    return relative(gradients(model), exact_gradients(net(), group.size()))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_are_as_close_to_the_mean_as_one_code_allows_and_vectors_exact(
    ranks: Ranks, size: int, bits: int
) -> None:
    for errors in ranks.run(gradient_errors, bits, {}, size=size):
        assert len(errors) == 10
        for name, error in errors.items():
            if name in CODED:
                assert 1e-7 < error < BOUNDS[bits]
            else:
                assert error < 1e-10


def divided(group: dist.ProcessGroup, by: float) -> dict[str, float]:
    model = sharded(group)
    quantize_fsdp(model, 8, None)
    for module in (model, model.body):
        module.set_gradient_divide_factor(by)
    loss(model, group.rank()).backward()
    exact = exact_gradients(net(), group.size())
    return relative(gradients(model), {n: g * group.size() / by for n, g in exact.items()})


@pytest.mark.parametrize("by", [1.0, 3.0, float(SIZE)])
def test_gradients_are_divided_by_a_factor_of_the_scripts(ranks: Ranks, by: float) -> None:
    for errors in ranks.run(divided, by):
        assert max(errors[name] for name in CODED) < BOUNDS[8]
        assert max(error for name, error in errors.items() if name not in CODED) < 1e-10


def test_rules_by_name_choose_bits(ranks: Ranks) -> None:
    settings = {"rules": "side*=32, body.0*=8", "min_elements": 100}
    for errors in ranks.run(gradient_errors, 4, settings, size=2):
        assert errors["side.weight"] < 1e-10
        assert 1e-7 < errors["body.0.weight"] < BOUNDS[8]
        assert BOUNDS[8] < errors["head.weight"] < BOUNDS[4]


def errors_of_joint_modules(group: dist.ProcessGroup) -> dict[str, float]:
    model = net()
    mesh = DeviceMesh.from_group(group, here().type)
    fully_shard([model.side, model.body], mesh=mesh)
    fully_shard(model, mesh=mesh)
    quantize_fsdp(model, 4, None, rules="side*=8")
    loss(model, group.rank()).backward()
    return relative(gradients(model), exact_gradients(net(), group.size()))


def test_modules_that_are_sharded_together_are_coded_each_by_its_rule(ranks: Ranks) -> None:
    for errors in ranks.run(errors_of_joint_modules, size=2):
        assert 1e-7 < errors["side.weight"] < BOUNDS[8]
        assert BOUNDS[8] < errors["body.0.weight"] < BOUNDS[4]
        assert all(error < 1e-10 for name, error in errors.items() if name not in CODED)


def test_rotated_buckets_are_closer_in_as_many_bits(ranks: Ranks) -> None:
    """EDEN's 3 bits lose no more than QSGD's 4, its 4 bits a quarter of that."""
    for bits, bound in ((4, BOUNDS[4] / 3), (3, BOUNDS[4]), (1, 0.7)):
        for errors in ranks.run(gradient_errors, bits, {"scheme": "eden"}, size=2):
            assert all(1e-7 < errors[name] < bound for name in CODED)


def seen_weights(group: dist.ProcessGroup, bits: int) -> Any:
    model = sharded(group)
    quantize_fsdp(model, None, bits)
    first, again = weights(model), weights(model)
    assert all(torch.equal(first[n], again[n]) for n in first), "the same weights, other codes"
    loss(model, group.rank()).backward()
    local = net()
    local.load_state_dict(first)
    at_codes = relative(gradients(model), exact_gradients(local, group.size()))
    torch.optim.SGD(model.parameters(), 0.0).step()
    after = weights(model)
    assert not torch.equal(first["side.weight"], after["side.weight"]), "the noise must be new"
    kept = {n: full(p).detach() for n, p in model.named_parameters()}
    assert all(torch.equal(kept[n], p) for n, p in net().named_parameters()), "shards stay exact"
    errors = relative(
        {n: w.double() for n, w in first.items()},
        {n: p.detach().double() for n, p in net().named_parameters()},
    )
    return errors, at_codes, b"".join(w.cpu().numpy().tobytes() for w in first.values())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_all_ranks_compute_with_the_same_coded_weights_forwards_and_backwards(
    ranks: Ranks, size: int, bits: int
) -> None:
    answers = ranks.run(seen_weights, bits, size=size)
    assert len({seen for _, _, seen in answers}) == 1, "ranks differ"
    for errors, at_codes, _ in answers:
        for name, error in errors.items():
            assert 1e-7 < error < BOUNDS[bits] if name in CODED else error == 0
        assert max(at_codes.values()) < 1e-10


def trained(group: dist.ProcessGroup, steps: int, resumed: Any = None) -> Any:
    model = sharded(group)
    if resumed is not None:
        for parameter, value in zip(model.parameters(), resumed["model"], strict=True):
            parameter.to_local().detach().copy_(value)
    shards = quantize_fsdp(model)
    if resumed is not None:
        shards.load_state_dict(resumed["shards"])
    begun = 0 if resumed is None else resumed["step"]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(begun, begun + steps):
        optimizer.zero_grad()
        loss(model, group.rank(), step).backward()
        optimizer.step()
    local = [p.to_local().detach().clone() for p in model.parameters()]
    return {"model": local, "shards": shards.state_dict(), "step": begun + steps}


def resumed_or_not(group: dist.ProcessGroup) -> bool:
    straight, half = trained(group, 4), trained(group, 2)
    on = trained(group, 2, half)
    return all(map(torch.equal, straight["model"], on["model"]))


def test_a_training_that_resumes_takes_the_same_steps(ranks: Ranks) -> None:
    assert ranks.run(resumed_or_not, size=3) == [True] * 3


def counted(group: dist.ProcessGroup) -> dict[str, int]:
    model = sharded(group)
    shards = quantize_fsdp(model, 4, 8, min_elements=1)
    loss(model, group.rank()).backward()
    return shards.traffic()


def test_bytes_are_those_of_the_codes(ranks: Ranks) -> None:
    for sent in ranks.run(counted, size=2):
        padded = sum(2 * -(-p.shape[0] // 2) * p[0].numel() for p in net().parameters())
        assert sent["gradients_uncoded"] == padded / 2 * 4
        # Gathered for the forward pass, and, but for those of the root, for the backward pass.
        again = sum(2 * -(-p.shape[0] // 2) * p[0].numel() for p in net().body.parameters())
        assert sent["weights_uncoded"] == (padded + again) / 2 * 4
        assert 0.125 < sent["gradients"] / sent["gradients_uncoded"] < 0.2
        assert 0.25 < sent["weights"] / sent["weights_uncoded"] < 0.33


def uncoded(group: dist.ProcessGroup) -> tuple[dict[str, int], bool]:
    model, plain = sharded(group), sharded(group)
    shards = quantize_fsdp(model, None, None)
    for each in (model, plain):
        loss(each, group.rank()).backward()
    same = all(map(torch.equal, gradients(model).values(), gradients(plain).values()))
    return shards.traffic(), same


def test_without_codes_it_counts_what_fsdp_sends(ranks: Ranks) -> None:
    for sent, same in ranks.run(uncoded, size=2):
        assert same
        assert sent["gradients"] == sent["gradients_uncoded"] > 0
        assert sent["weights"] == sent["weights_uncoded"] > 0


def unused(group: dist.ProcessGroup) -> dict[str, float]:
    model = sharded(group)
    quantize_fsdp(model, 8, None)
    loss(model, group.rank(), aside=False).backward()
    assert model.side.weight.grad is None
    got = {n: full(p.grad).double() for n, p in model.named_parameters() if p.grad is not None}
    return relative(got, exact_gradients(net(), group.size(), aside=False))


def test_a_parameter_without_a_gradient_does_not_harm_the_others(ranks: Ranks) -> None:
    for errors in ranks.run(unused, size=3):
        assert len(errors) == 9
        assert max(errors.values()) < 0.05  # of vectors that share buckets with larger elements


def partly_frozen(group: dist.ProcessGroup, settings: Any) -> dict[str, float]:
    """Freeze some parameters before the first step, another one after it."""
    model, exact = sharded(group), net()
    for each in (model, exact):
        each.body[0].weight.requires_grad_(False)
        each.scale.requires_grad_(False)
    quantize_fsdp(model, 4, None, **settings)
    loss(model, group.rank()).backward()
    for each in (model, exact):
        each.body[1].bias.requires_grad_(False)
        each.zero_grad()
    loss(model, group.rank()).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    got = {name: full(p.grad).double() for name, p in trained.items()}
    return relative(got, exact_gradients(exact, group.size()))


def test_a_partly_frozen_module_keeps_its_rules(ranks: Ranks) -> None:
    for errors in ranks.run(partly_frozen, {"rules": "body.2.weight=8"}, size=2):
        assert len(errors) == 7
        for name, error in errors.items():
            if name in CODED:
                assert 1e-7 < error < BOUNDS[8 if name.startswith("body.2") else 4]
            else:
                assert error < 1e-10


def replicated(group: dist.ProcessGroup) -> float:
    """Return the error of the matrices if every rank has the same gradient."""
    model = net()
    if group.size() == SIZE:
        names = ("replicas", "shards")
        grid = torch.arange(SIZE).reshape(2, SIZE // 2)
        mesh = DeviceMesh(here().type, grid, mesh_dim_names=names)
    else:
        mesh = DeviceMesh.from_group(group, here().type)
    fully_shard(model, mesh=mesh)
    quantize_fsdp(model, 4, None)
    loss(model, 0).backward()
    return relative(gradients(model), exact_gradients(net(), 1))["body.0.weight"]


def test_noise_averages_out_over_replicas(ranks: Ranks) -> None:
    """Two replicas of two ranks have half of the error of two ranks."""
    one, two = ranks.run(replicated, size=2)[0], ranks.run(replicated, size=4)[0]
    assert two < 0.7 * one


def beside_tensor_parallel(group: dist.ProcessGroup) -> bytes:
    """Return the gradients of two shards, whose module has a copy on each of two ranks."""
    names = ("data", "tensor")
    mesh = DeviceMesh(here().type, torch.arange(SIZE).reshape(2, SIZE // 2), mesh_dim_names=names)
    model = net()
    fully_shard(model, mesh=mesh["data"])
    quantize_fsdp(model, 4, None)
    loss(model, group.rank() // 2).backward()
    return b"".join(g.cpu().numpy().tobytes() for g in gradients(model).values())


def test_ranks_of_tensor_parallelism_keep_equal_copies(ranks: Ranks) -> None:
    assert len(set(ranks.run(beside_tensor_parallel))) == 1


def low_precision(group: dist.ProcessGroup) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(group, mp_policy=policy)
    quantize_fsdp(model)
    seen = weights(model)
    loss(model, group.rank()).backward()
    return {w.dtype for w in seen.values()}, relative(
        gradients(model), exact_gradients(net(), group.size())
    )


def test_mixed_precision(ranks: Ranks) -> None:
    for dtypes, errors in ranks.run(low_precision, size=2):
        assert dtypes == {torch.bfloat16}
        assert max(errors.values()) < BOUNDS[4] * 1.2


def unsharded_early(group: dist.ProcessGroup) -> bool:
    model = sharded(group)
    quantize_fsdp(model)
    wanted = weights(model)["side.weight"]
    handle = model.unshard(async_op=True)
    handle.wait()
    return torch.equal(model.side.weight, wanted)


def test_weights_are_gathered_ahead_of_their_use(ranks: Ranks) -> None:
    assert ranks.run(unsharded_early, size=3) == [True] * 3


def poisoned(group: dist.ProcessGroup) -> list[str]:
    model = sharded(group)
    quantize_fsdp(model)
    value = loss(model, group.rank())
    (value * (torch.inf if group.rank() == 1 else 1)).backward()
    return [n for n, p in model.named_parameters() if full(p.grad).isfinite().all()]


def test_inf_on_one_rank_is_seen_by_the_owners(ranks: Ranks) -> None:
    assert ranks.run(poisoned, size=3) == [[]] * 3


def accumulated(group: dist.ProcessGroup) -> dict[str, float]:
    model = sharded(group)
    quantize_fsdp(model, 8, None)
    model.set_requires_gradient_sync(False)
    loss(model, group.rank()).backward()
    model.set_requires_gradient_sync(True)
    loss(model, group.rank()).backward()
    wanted = exact_gradients(net(), group.size())
    return relative(gradients(model), {n: 2 * g for n, g in wanted.items()})


def test_gradients_accumulate(ranks: Ranks) -> None:
    for errors in ranks.run(accumulated, size=2):
        assert max(errors.values()) < BOUNDS[8]


def on_another_number(group: dist.ProcessGroup, state: dict[str, int]) -> dict[str, int]:
    model = sharded(group)
    shards = quantize_fsdp(model)
    shards.load_state_dict(state)
    with pytest.raises(UsageError, match=r"other modules: 'tail'"):
        shards.load_state_dict({**state, "tail": 1})
    return shards.state_dict()


def test_the_state_fits_any_number_of_ranks(ranks: Ranks) -> None:
    state = ranks.run(trained, 2, size=3)[0]["shards"]
    assert state == {"": 2, "body": 2}
    assert ranks.run(on_another_number, state, size=2) == [state] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_bits": 1}, r"gradient_bits=1\): one bit needs error feedback"),
        ({"weight_bits": 1}, r"weight_bits=1\): one bit needs"),
        ({"rules": "*=1"}, "one bit needs"),
        ({"gradient_bits": 9}, "1 to 8"),
        ({"gradient_bits": "auto"}, r"quantize_fsdp\(bits='auto'\): the planner does not measure"),
        ({"scheme": "sign"}, r"scheme='sign'\): choose qsgd or eden"),
        ({"scheme": "eden", "norm": "l2"}, "it accepts bucket_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    ranks: Ranks, settings: dict[str, Any], message: str
) -> None:
    for text in ranks.run(refusal, settings, size=2):
        assert re.search(message, text), text


def refusal(group: dist.ProcessGroup, settings: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as refused:
        quantize_fsdp(sharded(group), **settings)
    return str(refused.value)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(UsageError, match="no module of this Sequential is sharded"):
        quantize_fsdp(mlp())


def test_a_study_with_an_older_pytorch_times_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("qsgd_hpc.torch.fsdp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_api", None)
    watch_shards(nn.Linear(2, 2))
