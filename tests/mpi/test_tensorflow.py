"""What goes wrong on one rank while another runs a compiled function ends that, too."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

SCRIPT = """
import os
import signal
import tensorflow as tf
import qsgd_hpc.tensorflow as hvd

hvd.init()
weights = tf.Variable(tf.ones(200_000))

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * weights)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.qsgd(bits=4))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))

for i in range(100_000):
    step()
    if i == 30 and hvd.rank() == 1:
        {fault}
"""


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "died: its process ended"),
        ("raise ValueError('bad batch')", 1, "it ended with ValueError: bad batch"),
        ("break", 1, "its script ended"),
    ],
)
def test_a_rank_that_leaves_ends_the_compiled_step_of_the_other(
    run_ranks, python, tmp_path, fault, code, text
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(fault=fault))
    done = run_ranks(2, python, str(script), timeout_s=120)
    assert done.returncode == code, done.stderr[-3000:]
    assert any("rank 1 " in line and text in line for line in done.stderr.splitlines())
