"""The script of docs/jax.md as it stands there, with and without a fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("optax")

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


@pytest.fixture
def example(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    return script


@pytest.mark.gate
@pytest.mark.one_mpi
def test_the_script_of_the_docs_trains_on_two_ranks(run_ranks, python, example):
    with example.open("a") as script:
        script.write(
            "assert len(set(hvd.allgather_object(jax.device_get(params)['last']['kernel']"
            ".tobytes()))) == 1\n"
            "assert 'gradient.first.kernel' in hvd.compression_stats()\n"
        )
    done = run_ranks(2, python, str(example))
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = re.findall(r"loss after 100 steps on 2 ranks: (\S+)", done.stdout)
    assert float(found) < 0.2


@pytest.mark.gate
@pytest.mark.one_mpi
def test_a_killed_rank_ends_the_compiled_program_of_the_other(run_ranks, python, example):
    text = example.read_text().replace("range(100)", "range(10**6)")
    example.write_text(
        text.replace(
            "    with hvd.translated",
            "    if i == 50 and hvd.rank() == 1:\n"
            "        import os, signal\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "    with hvd.translated",
        )
    )
    done = run_ranks(2, python, str(example), timeout_s=120)
    assert done.returncode != 0
    assert "RankFailedError: rank 1" in done.stderr, done.stderr[-3000:]


# Rank 0's call has two operations: rank 1 disagrees on the first, and leaves without the other.
LOST = """
import jax, jax.numpy as jnp
import qsgd_hpc.jax as hvd

hvd.init()
try:
    if hvd.rank() == 1:
        hvd.allreduce(jnp.zeros(4), name="gradient.b")
    else:
        with hvd.translated_errors():
            reduce = jax.jit(hvd.allreduce_gradients)
            jax.block_until_ready(reduce({"a": jnp.zeros(2), "b": jnp.zeros(3)}))
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()}: {error}", flush=True)
"""


@pytest.mark.one_mpi
def test_a_program_ends_if_a_part_of_its_call_is_lost(run_ranks, python):
    done = run_ranks(2, python, "-c", LOST, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank}: tensor 'allreduce.gradient.b'" in done.stdout


# Rank 1 keeps no array, and its script ends while rank 0 is far from its last step.
UNREAD = """
import time
import jax, jax.numpy as jnp, optax
import qsgd_hpc.jax as hvd

def train():
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    weights = jnp.ones((64, 64))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        gradient = jax.grad(lambda w: (w**2).mean())(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(10):
        weights, state = step(weights, state)
        if hvd.rank() == 0:
            weights.block_until_ready()
            time.sleep(0.1)

hvd.init()
train()
"""


@pytest.mark.one_mpi
def test_a_script_that_keeps_no_array_ends_after_its_last_step(run_ranks, python):
    done = run_ranks(2, python, "-c", UNREAD, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]


REFUSED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import qsgd_hpc.jax as hvd

hvd.init()
jax.config.update("jax_enable_x64", True)

def refusal(function, x):
    try:
        with hvd.translated_errors():
            jax.block_until_ready(function(x))
    except hvd.UsageError as error:
        print("refused:", error)

mesh = jax.sharding.Mesh(jax.devices(), "d")
sharded = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
refusal(jax.jit(hvd.allreduce), sharded)
refusal(hvd.allreduce, jnp.ones(3, "uint64"))
refusal(jax.jit(hvd.allreduce), jnp.ones(3, "uint64"))
"""


@pytest.mark.one_mpi
def test_what_the_core_cannot_reduce_is_refused_with_a_remedy(run_ranks, python, tmp_path):
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    devices = "--xla_force_host_platform_device_count=2"
    done = run_ranks(1, python, str(script), XLA_FLAGS=devices)
    assert done.returncode == 0, done.stderr[-3000:]
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert "2 devices" in refusals[0] and "qsgd-hpc run -np N" in refusals[0]
    assert all("uint64" in line and "astype()" in line for line in refusals[1:])
    assert len(refusals) == 3
