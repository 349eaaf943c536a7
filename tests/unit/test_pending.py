"""When gradients that are ready are started."""

from __future__ import annotations

import pytest

from qsgd_hpc._base.pending import BATCH_BYTES, PendingGradients


class Done:
    """A reduction that has ended."""

    def wait(self) -> None:
        """Return at once."""


@pytest.fixture
def starts():
    """Names in the order of their start, and the reductions of gradients of these sizes."""
    order: list[str] = []
    sizes = {"small": 10, "other": 20, "large": BATCH_BYTES, "unused": 5}

    def start(names):
        order.extend(names)
        return {name: Done() for name in names}

    return order, PendingGradients(passes=1, start=start, size_bytes=sizes.__getitem__)


def test_small_gradients_wait_for_company_and_start_in_order(starts):
    order, pending = starts
    pending.ready("small")
    pending.ready("other")
    assert order == []
    assert pending.any
    pending.ready("large")
    assert order == ["small", "other", "large"]


def test_whoever_waits_starts_what_is_left(starts):
    order, pending = starts
    pending.ready("other")
    missing: list[str] = []
    pending.finish(["small", "other", "unused"], missing.append)
    assert order == ["other", "small", "unused"]
    assert missing == ["small", "unused"]
    assert not pending.any


def test_an_ended_step_leaves_nothing_for_the_next(starts):
    order, pending = starts
    pending.ready("small")
    pending.forget()
    assert not pending.any
    pending.ready("large")
    assert order == ["large"]
