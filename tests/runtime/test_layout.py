"""Where a rank is among nodes that may have different numbers of ranks."""

from __future__ import annotations

import pytest

from qsgd_hpc.runtime.mpi_binding import Layout

UNEVEN = [[0, 3, 4], [1], [2, 5]]


@pytest.mark.parametrize(
    ("rank", "node", "local_rank", "across"),
    [
        (0, [0, 3, 4], 0, [0, 1, 2]),
        (1, [1], 0, [0, 1, 2]),
        (3, [0, 3, 4], 1, [3, 5]),
        (4, [0, 3, 4], 2, [4]),
        (5, [2, 5], 1, [3, 5]),
    ],
)
def test_a_rank_finds_its_place(rank, node, local_rank, across):
    layout = Layout(UNEVEN, rank)
    assert (layout.node, layout.local_rank, layout.across) == (node, local_rank, across)
    assert not layout.homogeneous


def test_nodes_of_equally_many_ranks_are_homogeneous():
    assert Layout([[0, 2], [1, 3]], 3).homogeneous
