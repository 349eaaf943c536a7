"""How an elastic sampler shares a data set among ranks."""

from __future__ import annotations

import pytest

from qsgd_hpc.frameworks.parts import ElasticShares
from qsgd_hpc.runtime import basics


@pytest.fixture
def on(monkeypatch):
    """Return on(rank, size) that makes this process that rank."""

    def become(rank, size):
        monkeypatch.setattr(basics, "rank", lambda: rank)
        monkeypatch.setattr(basics, "size", lambda: size)

    return become


def shares(on, size, **arguments):
    samplers = []
    for rank in range(size):
        on(rank, size)
        samplers.append(ElasticShares(range(arguments.pop("n", 10)), **arguments))
        arguments["n"] = len(samplers[0].dataset)
    return samplers


@pytest.mark.parametrize("n", [0, 1, 2, 9, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_get_equally_many_and_together_everything(on, n, size, shuffle):
    all_shares = shares(on, size, n=n, shuffle=shuffle)
    assert {len(s) for s in all_shares} == {-(-n // size)}
    assert [len(list(s)) for s in all_shares] == [len(s) for s in all_shares]
    assert {i for s in all_shares for i in s} == set(range(n))
    assert all_shares[0].total_size == size * len(all_shares[0])


def test_epochs_and_seeds_are_shuffled_anew_and_alike_on_every_rank(on):
    first, second = shares(on, 2, n=100)
    assert first.remaining_indices == second.remaining_indices != list(range(100))
    before = list(first)
    on(0, 2)
    first.set_epoch(1)
    assert list(first) != before
    first.set_epoch(0)
    assert list(first) == before
    assert list(ElasticShares(range(100), seed=1)) != before


def test_what_is_processed_is_not_shared_again_on_other_ranks(on):
    first, second = shares(on, 2, n=20)
    for sampler in (first, second):
        sampler.record_batch(0, 3)
        sampler.record_batch(1, 3)
    done = first.processed_indices | second.processed_indices
    assert done == set(first.indices[:6] + second.indices[:6])
    state = {**first.state_dict(), "processed_indices": done}
    rest = []
    for rank in range(3):
        on(rank, 3)
        sampler = ElasticShares(range(20))
        sampler.load_state_dict(state)
        assert len(sampler) == 3
        rest += list(sampler)
    assert set(rest) == set(range(20)) - done


def test_a_state_is_a_copy_and_a_new_epoch_forgets(on):
    (sampler,) = shares(on, 1)
    state = sampler.state_dict()
    sampler.record_indices([1, 2])
    assert state["processed_indices"] == set()
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"epoch": 3, "processed_indices": set()}


def test_the_last_batch_may_be_short(on):
    (sampler,) = shares(on, 1, shuffle=False)
    assert sampler.get_indices(2, 4) == [8, 9]
    assert sampler.get_indices(3, 4) == []
