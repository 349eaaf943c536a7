"""Compression as a training script meets it, on any number of ranks: see test_torch.py."""

from __future__ import annotations

import gc
import math

import pytest
import torch

import qsgd_hpc.torch as hvd

OUT, IN = 64, 32


@pytest.fixture(scope="module", autouse=True)
def ranks_that_send(torch_job):
    if hvd.size() == 1:
        pytest.skip("one rank sends nothing that could be compressed")


def data(rank):
    """Inputs and targets of a regression whose optimum is no rank's own."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, IN, generator=generator)
    truth = torch.randn(IN, OUT, generator=torch.Generator().manual_seed(99))
    return x, x @ truth + (1 + rank) * torch.randn(64, OUT, generator=generator)


def wrapped(compression, lr=0.05):
    model = torch.nn.Linear(IN, OUT)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression
    )


def train(model, optimizer, steps):
    """Return the mean loss over the ranks at the end."""
    x, y = data(hvd.rank())

    def loss():
        return (model(x) - y).square().sum(1).mean()

    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    with torch.no_grad():
        return hvd.allreduce(loss()).item()


def excess(compression, steps=200):
    """Loss above that of uncompressed training, as a share of it."""
    exact = train(*wrapped(hvd.Compression.none), steps)
    model, optimizer = wrapped(compression)
    result = train(model, optimizer, steps) / exact - 1
    assert torch.equal(model.weight, hvd.broadcast(model.weight.detach(), 0))
    return result


FED_BACK = {
    "1 bit": (lambda **more: hvd.Compression.qsgd(bits=1, **more), 0.01),
    "top-k": (lambda **more: hvd.Compression.topk(0.05, **more), 0.05),
}


@pytest.mark.parametrize(("make", "limit"), FED_BACK.values(), ids=FED_BACK.keys())
def test_error_feedback_trains_biased_codes_that_stall_without(make, limit):
    assert excess(make()) < limit
    assert excess(make(error_feedback=False)) > 4 * limit


@pytest.mark.parametrize(
    "compression", [hvd.Compression.qsgd(bits=2), hvd.Compression.eden(bits=1)]
)
def test_few_bits_with_error_feedback_train_to_the_uncompressed_loss(compression):
    assert compression.feeds_back
    assert excess(compression) < 0.01


def test_codes_whose_length_varies_train_and_send_what_they_need():
    assert excess(hvd.Compression.elias()) < 0.05
    (weight,) = qualities(hvd.Compression.elias(), steps=2)
    assert weight["bits"] == 0 if hvd.size() == 1 else 1 < weight["bits"] < 3.2


@pytest.mark.parametrize(("code", "fewest"), [("qsgd", 4), ("eden", 3)])
def test_open_bits_are_chosen_alike_on_every_rank_and_train(code, fewest):
    compression = getattr(hvd.Compression, code)(bits="auto")
    assert excess(compression) < 0.1
    (weight,) = qualities(compression, steps=2)
    assert round(weight["bits"]) in ((32,) if hvd.size() == 1 else (fewest, 4, 8, 32))
    assert hvd.broadcast_object(weight["coding"], 0) == weight["coding"]


def qualities(compression, steps):
    """Train and return the statistics of bias and weight, or of the one that was compressed."""
    before = set(hvd.compression_stats())
    train(*wrapped(compression), steps)
    stats = hvd.compression_stats()
    return [stats[name] for name in sorted(set(stats) - before)]


def test_rules_give_each_parameter_its_bits():
    rules = "*bias=8, weight=2"
    bias, weight = qualities(hvd.Compression.qsgd(bits=4, rules=rules), steps=2)
    assert (weight["bits"], weight["elements"]) == (2, OUT * IN)
    assert (bias["bits"], bias["elements"]) == (8, OUT)
    assert weight["wire_bytes"] == 4 * 4 + OUT * IN // 4
    assert bias["nmse"] < 1e-3 < weight["nmse"]  # its owner may have coded none of the bias


def test_rules_give_parameters_that_are_added_later_their_bits():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(40, 40), "head": torch.nn.Linear(40, 40)})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model["head"].parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=4, rules="body.weight=8"),
    )
    optimizer.add_param_group({"params": model["body"].parameters()})
    before = set(hvd.compression_stats())
    model["head"](model["body"](torch.ones(2, 40))).sum().backward()
    optimizer.step()
    stats = hvd.compression_stats()
    bits = {name.split(".", 1)[1]: stats[name]["bits"] for name in set(stats) - before}
    assert {name[-11:]: each for name, each in bits.items()} == {"head.weight": 4, "body.weight": 8}


@pytest.mark.parametrize(("code", "bits", "enough"), [("qsgd", 2, 4), ("eden", 1, 2)])
def test_a_budget_raises_the_bits_of_what_exceeds_it(code, bits, enough):
    compression = getattr(hvd.Compression, code)(bits=bits, nmse_budget=0.2)
    (weight,) = qualities(compression, steps=4)
    assert weight["bits"] == enough
    assert weight["nmse"] < 0.2
    everyone = [hvd.broadcast_object(weight["coding"], rank) for rank in range(hvd.size())]
    assert len(set(everyone)) == 1


def restart(ranks):
    """Leave the job and enter one of the first ``ranks`` ranks; others get one of their own."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    hvd.shutdown()
    hvd.init(comm=MPI.COMM_WORLD.Split(0 if rank < ranks else rank, rank))


@pytest.mark.parametrize(
    "compression", [hvd.Compression.topk(0.05), hvd.Compression.sign(), hvd.Compression.eden(1)]
)
def test_what_is_owed_survives_a_restart_on_more_ranks(compression):
    """Sums of results and what is still owed, over both jobs, make up all gradients."""
    world = hvd.size()
    if world < 3:
        pytest.skip("a job on fewer ranks, that still compresses, needs three")
    count, name = 3000, "restarted"

    def gradient(rank, step):
        return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank))

    def run(steps):
        total = torch.zeros(count)
        for step in steps:
            total += hvd.allreduce(gradient(hvd.rank(), step), name=name, compression=compression)
        return total

    ranks = world - 1
    restart(ranks)
    first = run(range(4))
    saved = hvd.error_feedback_state()
    restart(world)
    first, saved = hvd.broadcast_object((first, saved), 0)
    hvd.load_error_feedback_state(saved)
    assert hvd.error_feedback_state()[name].tolist() == saved[name].tolist()
    second = run(range(4, 8))
    owed = hvd.error_feedback_state()[name]
    exact = sum(gradient(r, s) / ranks for r in range(ranks) for s in range(4))
    exact = exact + sum(gradient(r, s) / world for r in range(world) for s in range(4, 8))
    assert owed.abs().max() > 0.1
    assert torch.allclose(first + second + owed, exact, atol=1e-3)


def test_what_a_process_set_owes_is_saved_and_restored():
    if hvd.size() < 3:
        pytest.skip("rank 0 and a set of two")
    some = hvd.ProcessSet(list(range(1, hvd.size())))
    hvd.shutdown()
    hvd.init(process_sets=[some])
    try:
        compression = hvd.Compression.qsgd(bits=2, bucket_size=64)
        if some.included():
            torch.manual_seed(hvd.rank())
            x = torch.randn(4000)
            hvd.allreduce(x, name="w", process_set=some, compression=compression)
            assert hvd.compression_stats()["w"]["bits"] == 2
        saved = hvd.error_feedback_state()
        assert list(saved) == ["set1/w"]
        assert saved["set1/w"].any()
        assert saved["set1/w"].tolist() == hvd.broadcast_object(saved, 0)["set1/w"].tolist()
        hvd.load_error_feedback_state({})
        assert not hvd.error_feedback_state()
        hvd.load_error_feedback_state(saved)
        again = hvd.error_feedback_state()["set1/w"]
        assert torch.allclose(again, saved["set1/w"], rtol=0, atol=1e-6)
        if some.included():
            # Zeros, and what is owed: the state is paid back.
            zeros = torch.zeros(4000)
            paid = hvd.allreduce(zeros, name="w", process_set=some, compression=compression)
            assert (paid * saved["set1/w"]).sum() > 0
    finally:
        hvd.shutdown()
        hvd.init()


def test_a_checkpoint_of_residuals_loads_with_the_defaults_of_torch(tmp_path):
    hvd.load_error_feedback_state({"w": torch.ones(100)})
    torch.save(hvd.error_feedback_state(), tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert torch.equal(saved["w"], torch.ones(100))
    hvd.load_error_feedback_state({"w": saved["w"].numpy()})
    assert torch.equal(hvd.error_feedback_state()["w"], saved["w"])
    hvd.load_error_feedback_state({})


def test_a_call_names_an_argument_of_a_wrong_type():
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"op='sum': choose hvd\.Average"):
        hvd.allreduce(x, op="sum")
    for wrong in ("qsgd", None, hvd.Compression.qsgd):
        with pytest.raises(ValueError, match=r"choose one of hvd\.Compression"):
            hvd.allreduce(x, compression=wrong)
    with pytest.raises(ValueError, match="prescale_factor=nan: choose a finite number"):
        hvd.allreduce(x, prescale_factor=math.nan)


def test_deleted_optimizers_leave_no_residuals_behind():
    for _ in range(3):
        gc.collect()
        model, optimizer = wrapped(hvd.Compression.qsgd(bits=2))
        before = set(hvd.error_feedback_state())
        train(model, optimizer, 2)
        mine = set(hvd.error_feedback_state()) - before
        assert len(mine) == 1
        del model, optimizer
    gc.collect()
    wrapped(hvd.Compression.qsgd(bits=2))
    hvd.barrier()  # the engine has deleted them before the next operation
    assert not mine & set(hvd.error_feedback_state())


def test_residuals_loaded_after_their_optimizer_was_deleted_are_kept():
    model, optimizer = wrapped(hvd.Compression.qsgd(bits=2))
    train(model, optimizer, 2)
    saved = hvd.error_feedback_state()
    del model, optimizer
    gc.collect()
    hvd.load_error_feedback_state(saved)
    wrapped(hvd.Compression.qsgd(bits=2))
    hvd.barrier()
    assert saved.keys() <= hvd.error_feedback_state().keys()
    hvd.load_error_feedback_state({})


def test_a_state_of_another_form_is_refused():
    with pytest.raises(ValueError, match="error_feedback_state"):
        hvd.load_error_feedback_state({"w": torch.ones(3, 3).numpy()})
    with pytest.raises(ValueError, match="choose 1 to 8"):
        hvd.Compression.nuqsgd(bits=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types_are_compressed(dtype):
    mine = torch.randn(100, 100, generator=torch.Generator().manual_seed(hvd.rank()))
    exact = hvd.allreduce(mine)
    before = hvd.communication_stats()["wire_bytes"]
    coded = hvd.allreduce(mine.to(dtype), compression=hvd.Compression.qsgd(bits=4))
    assert hvd.communication_stats()["wire_bytes"] - before < 10_000
    assert coded.dtype == dtype
    assert 0 < (coded.float() - exact).norm() / exact.norm() < 0.5
    assert torch.equal(coded, hvd.broadcast(coded, 0))
