"""Which gradients are handed over together."""

from __future__ import annotations

from qsgd_hpc.frameworks.grouping import batches
from qsgd_hpc.frameworks.pending import BATCH_BYTES


def test_a_batch_ends_with_the_gradient_that_fills_it():
    half, whole = BATCH_BYTES // 2, BATCH_BYTES
    assert batches([]) == []
    assert batches([1]) == [[0]]
    assert batches([half, half, half]) == [[0, 1], [2]]
    assert batches([whole, 1, whole, 0, 2]) == [[0], [1, 2], [3, 4]]
