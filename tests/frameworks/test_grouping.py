"""Which gradients are reduced together."""

from __future__ import annotations

import pytest

from qsgd_hpc.frameworks.grouping import BATCH_BYTES, batches, choose_groups


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
