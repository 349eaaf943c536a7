"""What has nothing to do, or waits for others for long, leaves the cores to those that compute."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# Alone in a process, whose time of computing is the engines'; whatever else the machine does, an
# engine that spun would spend all of the time in which it has a core.
PROGRAM = """
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[1])
from qsgd_hpc import _core
from tests.engine.ranks import Rank

world = _core.ThreadWorld(2)
ranks = [Rank(world, rank, ranks_per_node={ranks_per_node}) for rank in range(2)]

def both():
    xs = [np.full(4, rank.rank + 1.0) for rank in ranks]
    for handle in [rank.allreduce("both", x) for rank, x in zip(ranks, xs)]:
        handle.wait()
    assert [x.tolist() for x in xs] == [[3.0] * 4] * 2

both()
late = np.ones(4)
first = ranks[{first}].allreduce("late", late) if {first} is not None else None
time.sleep(0.2)  # the brief part of its wait is over
began, computed = time.monotonic(), time.process_time()
time.sleep(1.5)
share = (time.process_time() - computed) / (time.monotonic() - began)
if first:
    ranks[1 - {first}].allreduce("late", np.ones(4)).wait()
    first.wait()
both()  # it is awake at once
print(share)
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda rank: rank.engine.shutdown("the test ended"), ranks))
"""


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize("first", [None, 0, 1], ids=["idle", "rank 0 waits", "rank 1 waits"])
def test_two_ranks_take_little_of_a_core(request, first, ranks_per_node):
    program = textwrap.dedent(PROGRAM).format(first=first, ranks_per_node=ranks_per_node)
    done = subprocess.run(
        [sys.executable, "-c", program, str(request.config.rootpath)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.25
