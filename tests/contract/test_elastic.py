"""Elastic states without a framework: what counts as a commit; see conftest.py."""

from __future__ import annotations

import pytest

from qsgd_hpc import elastic
from qsgd_hpc.errors import HorovodInternalError, RankFailedError
from qsgd_hpc.frameworks.parts import ValuePart
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.objects import broadcast_object


@pytest.fixture(scope="module", autouse=True)
def world():
    basics.init()


@pytest.fixture
def file(tmp_path):
    """A file that all ranks have."""
    return broadcast_object(tmp_path / "commits")


class CannotBeMerged(ValuePart):
    def merge(self, captured):
        raise HorovodInternalError("the ranks differ")


class DiesInSync(ValuePart):
    def sync(self):
        raise RankFailedError("rank 7 died")


def test_a_commit_that_fails_is_no_progress(file):
    attempts = []

    @elastic.run(checkpoint=file)
    def train(state):
        attempts.append(state.value)
        assert len(attempts) <= 2
        state.commit()

    with pytest.raises(HorovodInternalError, match="the ranks differ"):
        train(elastic.State(value=CannotBeMerged(1)))
    assert len(attempts) == 2


def test_the_file_of_an_earlier_job_is_named_when_a_rank_is_lost(file):
    def lose(state):
        raise RankFailedError("rank 7 died")

    def commit(state):
        state.commit()

    for train, said in (
        (lose, f"No commit is in {file} yet"),
        (commit, None),
        (lose, f"The last commit is in {file}"),
    ):
        elastic._owners.clear()  # each is another job
        run = elastic.run(train, checkpoint=file)
        if said is None:
            run(elastic.State(step=1))
            continue
        with pytest.raises(RankFailedError, match=said):
            run(elastic.State(step=0))


def test_a_rank_lost_before_training_begins_has_the_same_message():
    train = elastic.run(lambda state: None)
    with pytest.raises(RankFailedError, match="cannot continue without that rank"):
        train(elastic.State(value=DiesInSync(1)))


def test_a_file_that_was_removed_belongs_to_no_state(file):
    @elastic.run(checkpoint=file)
    def train(state):
        state.epoch += 1
        state.commit()
        return state.epoch

    for _ in range(2):  # as for the folds of a cross-validation
        assert train(elastic.State(epoch=0)) == 1
        broadcast_object(None)
        if basics.rank() == 0:
            file.unlink()
        broadcast_object(None)


def test_reset_callbacks_run_in_a_job_that_resumes(file):
    """Its number of ranks, and with it the learning rate, may differ from the last job's."""

    @elastic.run(checkpoint=file)
    def train(state):
        state.commit()
        return state.rate

    for rate in (0.5, 2.0):
        elastic._owners.clear()  # each is another job
        state = elastic.State(rate=0.5)
        state.register_reset_callbacks([lambda s=state: setattr(s, "rate", 4 * s.rate)])
        assert train(state) == rate


def test_commits_in_memory_need_no_other_rank():
    state = elastic.State(value=0)
    if basics.rank() == 0:
        state.value = 1
        state.commit()
    broadcast_object(None)
    assert state.value == (basics.rank() == 0)


def test_a_state_takes_the_arguments_of_horovod():
    rank = basics.rank()
    state = elastic.ObjectState(bcast_object=broadcast_object, get_rank=basics.rank, epoch=3 + rank)
    state.sync()
    assert state.epoch == 3
