"""A rank that is ahead does not flood the others with messages that they have not asked for."""

from __future__ import annotations

# libfabric reads nothing more of a TCP connection on which 64 messages wait that nobody has asked
# for: without a brake a large reduction never ended there.
PROGRAM = """
import sys
import numpy as np
from qsgd_hpc import _core
from qsgd_hpc.runtime import direct

with direct.communicator(shared=False) as communicator:
    x = np.full(1 << 26, communicator.comm.Get_rank(), np.float32)
    coding = None if sys.argv[1] == "none" else _core.CodecSpec(bits=8)
    for _ in range(2):
        communicator.allreduce([x], coding=coding, op="average")
    assert x[0] == x[-1] == 1
    communicator.broadcast(x, root=1)
    print("through")
"""


def over_tcp(run_ranks, tmp_path, coding):
    script = tmp_path / "flow.py"
    script.write_text(PROGRAM)
    # As on three hosts: messages through the network's layer, not through shared memory.
    done = run_ranks(3, str(script), coding, MPIR_CVAR_NOLOCAL="1", FI_PROVIDER="tcp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("through") == 3


def test_a_large_compressed_reduction_ends_over_tcp(run_ranks, tmp_path):
    over_tcp(run_ranks, tmp_path, "qsgd")


def test_a_large_exact_reduction_ends_over_tcp(run_ranks, tmp_path):
    over_tcp(run_ranks, tmp_path, "none")
