"""Tensors of more elements than a 32-bit count holds."""

from __future__ import annotations

import psutil
import pytest

NEEDED_BYTES = 14 << 30

LARGE = """
import numpy as np, torch, qsgd_hpc.torch as hvd

hvd.init()
me, most = hvd.rank(), 2**31 - 1
count = most + 18
# Where a count or an offset would wrap, and the end.
places = torch.tensor([0, 2**30, most - 1, most, most + 1, count - 1])

x = torch.zeros(count, dtype=torch.uint8)
x[places] = me + 1
hvd.allreduce_(x, op=hvd.Sum)
assert x[places].tolist() == [3] * len(places) and np.count_nonzero(x) == len(places)

x.zero_()
x[places] = me
hvd.broadcast_(x, root_rank=1)
assert x[places].tolist() == [1] * len(places) and np.count_nonzero(x) == len(places)

# A bucket of one value is coded without error.
del x
x = torch.ones(count, dtype=torch.float16)
x[-17:] = 1 + 2 * me
hvd.allreduce_(x, op=hvd.Average, name="coded", compression=hvd.Compression.qsgd(bits=4))
assert x.min() == 1 and (x[:most] == 1).all() and (x[-17:] == 2).all(), x[-20:]
print("right", flush=True)
"""


@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES,
    reason="two ranks with a tensor of 4 GB each take 14 GB of memory",
)
@pytest.mark.parametrize("algorithm", ("auto", "direct"))
def test_counts_beyond_32_bits(run_ranks, python, tmp_path, algorithm):
    script = tmp_path / "script.py"
    script.write_text(LARGE, encoding="utf-8")
    done = run_ranks(2, python, str(script), timeout_s=1000, QSGD_ALGORITHM=algorithm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["right"] * 2
