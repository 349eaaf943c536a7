"""When gradients that are ready are started."""

from __future__ import annotations

import pytest

from qsgd_hpc.frameworks.pending import BATCH_BYTES, PendingGradients, batches, choose_groups


class Done:
    """A reduction that has ended."""

    def wait(self) -> None:
        """Return at once."""


@pytest.fixture
def starts():
    """Names in the order of their start, and their reductions."""
    order: list[str] = []

    def start(names, together):
        assert not together or len(names) == 1
        order.extend(names)
        return {name: Done() for name in names}

    return order, PendingGradients(passes=1, start=start)


def test_small_gradients_wait_for_company_and_start_in_order(starts):
    order, pending = starts
    pending.ready("small", 10)
    pending.ready("other", 20)
    assert order == []
    assert pending.any
    pending.ready("large", BATCH_BYTES)
    assert order == ["small", "other", "large"]


def test_whoever_waits_starts_what_is_left(starts):
    order, pending = starts
    pending.ready("other", 20)
    missing: list[str] = []
    pending.finish(["small", "other", "unused"], missing.append)
    assert order == ["other", "small", "unused"]
    assert missing == ["small", "unused"]
    assert not pending.any


def test_an_ended_step_leaves_nothing_for_the_next(starts):
    order, pending = starts
    pending.ready("small", 10)
    pending.forget()
    assert not pending.any
    pending.ready("large", BATCH_BYTES)
    assert order == ["large"]


def test_a_batch_ends_with_the_gradient_that_fills_it():
    half, whole = BATCH_BYTES // 2, BATCH_BYTES
    assert batches([]) == []
    assert batches([1]) == [[0]]
    assert batches([half, half, half]) == [[0, 1], [2]]
    assert batches([whole, 1, whole, 0, 2]) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("wrong", [-1, 1.5, "ab"])
def test_groups_are_a_number_or_lists(wrong):
    for arguments in ((wrong, None), (0, wrong)):
        with pytest.raises(ValueError, match=f"groups={wrong!r}: choose 0"):
            choose_groups(*arguments)
