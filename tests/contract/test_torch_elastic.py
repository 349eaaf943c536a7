"""``hvd.elastic``: commits, and what survives a failure, on any number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

import qsgd_hpc.torch as hvd
from qsgd_hpc import elastic
from qsgd_hpc.elastic import State
from qsgd_hpc.errors import UsageError
from tests.contract.training import linear, loss_of, needs_ranks, replicas_are_identical

pytestmark = pytest.mark.usefixtures("torch_job")


@pytest.fixture
def file(tmp_path):
    return hvd.broadcast_object(tmp_path / "deep" / "state.pt", 0)


def training(**attributes):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, **attributes)


def step(state):
    state.optimizer.zero_grad()
    loss_of(state.model).backward()
    state.optimizer.step()


def test_restore_returns_to_the_last_commit():
    state = training(epoch=1, log=[])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(state.optimizer, 0.5)
    state = hvd.elastic.TorchState(
        state.model, state.optimizer, scheduler=scheduler, log=[], epoch=1
    )
    state.sync()
    assert replicas_are_identical(state.model)
    step(state)
    state.commit()
    weight = state.model.weight.detach().clone()
    for _ in range(2):
        step(state)
        scheduler.step()
        state.log.append("lost")
        state.epoch += 1
        state.restore()
        assert torch.equal(state.model.weight, weight)
        assert (state.epoch, state.log) == (1, [])
        assert state.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("state_of", [training, State], ids=["torch", "plain"])
def test_sync_gives_all_the_values_of_rank_0_and_what_any_rank_has_processed(state_of):
    sampler = hvd.elastic.ElasticSampler(range(8 * hvd.size()))
    state = state_of(sampler=sampler, name=f"of {hvd.rank()}")
    sampler.record_batch(0, 2)
    assert len(torch.utils.data.DataLoader(range(8 * hvd.size()), 2, sampler=sampler)) == 4
    state.sync()
    assert state.name == "of 0"
    assert len(sampler.processed_indices) == 2 * hvd.size()
    assert len(sampler) == 6
    assert not sampler.processed_indices & set(sampler)


def test_attributes_are_those_that_were_given():
    state = training(epoch=1)
    with pytest.raises(AttributeError, match="no attribute 'batch'"):
        _ = state.batch
    replaced = torch.nn.Linear(2, 2)
    state.model = replaced
    state.commit()
    kept = replaced.weight.detach().clone()
    with torch.no_grad():
        replaced.weight.zero_()
    state.restore()
    assert state.model is replaced
    assert torch.equal(replaced.weight, kept)


def rank_dependent_shapes():
    hvd.allreduce(torch.ones(hvd.rank() + 1), name="of different shapes")


@needs_ranks(2)
def test_a_failure_that_leaves_all_ranks_alive_is_tried_again_from_the_last_commit():
    state = training(batch=0)
    resets, starts = [], []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])

    @hvd.elastic.run
    def train(state, scale):
        starts.append(state.batch)
        for state.batch in range(state.batch, 5):  # noqa: B020
            step(state)
            if state.batch == 3 and len(starts) == 1:
                loss_of(state.model).backward()  # is under way when the job ends
                rank_dependent_shapes()
            if state.batch == 2:
                state.commit()
        return scale * state.batch

    assert train(state, 10) == 40
    assert (starts, resets) == ([0, 2], [2])
    assert replicas_are_identical(state.model)


@needs_ranks(2)
def test_an_optimizer_of_the_next_attempt_has_its_own_names():
    """Those of its first one, not those of an optimizer that has survived."""
    hvd.load_error_feedback_state({})

    def coded(model):
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=hvd.Compression.qsgd(bits=2, error_feedback=True),
        )

    first, second = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    optimizer, owed = coded(first), []

    @hvd.elastic.run
    def train(state):
        for model, its in ((first, optimizer), (second, coded(second))):
            model(torch.ones(8, 64)).square().mean().backward()
            its.step()
        owed.append(set(hvd.error_feedback_state()))
        if len(owed) == 1:
            state.commit()
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="fails")

    train(State(step=0))
    assert owed[0] == owed[1] and len(owed[0]) == 2


@needs_ranks(2)
def test_a_failure_that_comes_again_without_a_commit_is_raised():
    calls = itertools.count()

    @hvd.elastic.run
    def train(state):
        next(calls)
        rank_dependent_shapes()

    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        train(training())
    assert next(calls) == 2


def test_an_interrupt_forms_the_job_anew_and_keeps_the_state():
    state = training(epoch=0)

    @hvd.elastic.run
    def train(state):
        if state.epoch == 0:
            state.epoch = 1
            raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))

    assert train(state) == hvd.size()
    assert state.epoch == 1


def test_the_next_job_resumes_at_the_commit_in_the_file(file, capfd):
    weights = []

    def job(epochs):
        sampler = hvd.elastic.ElasticSampler(range(4 * hvd.size()), shuffle=False)
        state = training(epoch=0, sampler=sampler)

        @hvd.elastic.run(checkpoint=file)
        def train(state):
            began = state.epoch
            rest = len(state.sampler)
            for state.epoch in range(state.epoch + 1, epochs + 1):  # noqa: B020
                step(state)
                state.sampler.record_batch(state.epoch - began - 1, 1)
                state.commit()
            weights.append(state.model.weight.detach().clone())
            return began, rest

        return train(state)

    assert job(3) == (0, 4)
    with pytest.raises(UsageError, match="has the commits of another state of this process"):
        job(3)
    elastic._owners.clear()  # as in the next job
    assert job(3) == (3, 1)
    assert torch.equal(*weights)
    assert ("resuming" in capfd.readouterr().err) == (hvd.rank() == 0)
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@needs_ranks(2)
def test_the_file_keeps_what_error_feedback_owes(file):
    lossy = hvd.Compression.qsgd(bits=2, min_elements=0)
    hvd.load_error_feedback_state({})
    model, optimizer = linear(compression=lossy)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    state.keep_in(file)
    optimizer.zero_grad()
    model(torch.rand(2, 3)).pow(2).sum().backward()
    optimizer.step()
    owed = hvd.error_feedback_state()
    assert len(owed) == 1
    state.commit()
    hvd.load_error_feedback_state({})
    assert state.resume()
    (name,) = owed
    assert torch.allclose(owed[name], hvd.error_feedback_state()[name])


@needs_ranks(2)
def test_what_error_feedback_owes_comes_back_from_a_commit_in_memory():
    lossy = hvd.Compression.qsgd(bits=2, min_elements=0)
    hvd.load_error_feedback_state({})
    model, optimizer = linear(compression=lossy)
    owed = []

    @hvd.elastic.run
    def train(state):
        if owed:
            owed.append(hvd.error_feedback_state())
            return
        for attempt in range(2):
            optimizer.zero_grad()
            model(torch.rand(2, 3)).pow(2).sum().backward()
            optimizer.step()
            if attempt == 0:
                owed.append(hvd.error_feedback_state())
                state.commit()
        raise hvd.HorovodInternalError("as after NaN")

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer))
    (name,) = owed[0]
    assert owed[0][name].any()
    assert torch.allclose(torch.as_tensor(owed[0][name]), torch.as_tensor(owed[1][name]))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_failed_leaves_nothing_to_the_next_attempt(enabled):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    state = training(scaler=scaler)
    state.sync()
    state.commit()
    for attempt in range(2):
        scaler.scale(loss_of(state.model)).backward()
        scaler.unscale_(state.optimizer)
        if attempt == 0:
            first = state.model.weight.grad.clone()
            state.restore()
            state.on_reset()
            assert state.model.weight.grad is None
    assert torch.equal(state.model.weight.grad, first)


def test_a_second_call_goes_on_with_what_the_script_assigned(file):
    state, seen = training(epoch=0), []

    @hvd.elastic.run(checkpoint=file)
    def train(state, epochs):
        while state.epoch < epochs:
            step(state)
            state.epoch += 1
            state.commit()
            seen.append(state.epoch)

    train(state, 2)
    state.epoch = 0
    train(state, 3)
    assert seen == [1, 2, 1, 2, 3]


@needs_ranks(2)
def test_an_attempt_owes_what_was_owed_at_the_commit():
    hvd.load_error_feedback_state({})
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=2, error_feedback=True),
    )
    state, owed = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0), []

    def owes():
        return {n: float(v.norm()) for n, v in hvd.error_feedback_state().items()}

    @hvd.elastic.run
    def train(state):
        owed.append(owes())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            if len(owed) == 1 and state.step == 0:
                state.step = 1
                state.commit()
                owed.append(owes())
        if len(owed) == 2:
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="fails")

    train(state)
    before, committed, again = owed
    assert before == {} and committed == again != {}
