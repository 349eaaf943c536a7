"""Which ranks init makes a job of: all, some, several side by side and one after another."""

from __future__ import annotations

import pytest

from qsgd_hpc.runtime import gpu

TRAIN = """
import torch, qsgd_hpc.torch as hvd
from mpi4py import MPI

def train(steps=5):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(64, 64)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=4, min_elements=1),
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().numpy().tobytes()

def summed():
    return hvd.allreduce(torch.tensor([float(world.Get_rank())]), op=hvd.Sum, name="sum").item()

world = MPI.COMM_WORLD
me = world.Get_rank()
"""


def check(run_ranks, python, tmp_path, ranks: int, body: str, *options: str) -> list[str]:
    """Run TRAIN + body on every rank and return the lines printed, sorted."""
    script = tmp_path / "script.py"
    script.write_text(TRAIN + body, encoding="utf-8")
    done = run_ranks(ranks, *options, python, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def test_sub_communicators_train_side_by_side_each_on_its_own(run_ranks, python, tmp_path):
    lines = check(
        run_ranks, python, tmp_path, 4,
        "half = world.Split(me // 2, me)\n"
        "hvd.init(comm=half)\n"
        "weights = train()\n"
        "print('job', me // 2, hvd.rank(), hvd.size(), summed(), flush=True)\n"
        "hvd.shutdown()\n"
        "everyone = world.allgather(weights)\n"
        "assert everyone[0] == everyone[1] and everyone[2] == everyone[3]\n",
    )  # fmt: skip
    assert lines == ["job 0 0 2 1.0", "job 0 1 2 1.0", "job 1 0 2 5.0", "job 1 1 2 5.0"]


def test_jobs_follow_each_other_on_other_communicators(run_ranks, python, tmp_path):
    """init, shutdown, init: all ranks, then halves, then a list of ranks, then all again."""
    lines = check(
        run_ranks, python, tmp_path, 4,
        "found = []\n"
        "for comm in (None, world.Split(me % 2, me), [0, 1, 2] if me < 3 else [3], []):\n"
        "    hvd.init(comm)\n"
        "    hvd.init()\n"  # again is harmless
        "    train(2)\n"
        "    found += [(hvd.rank(), hvd.size(), summed())]\n"
        "    hvd.shutdown()\n"
        "    assert not hvd.is_initialized()\n"
        "print(me, found, flush=True)\n",
    )  # fmt: skip
    assert lines == [
        "0 [(0, 4, 6.0), (0, 2, 2.0), (0, 3, 3.0), (0, 4, 6.0)]",
        "1 [(1, 4, 6.0), (0, 2, 4.0), (1, 3, 3.0), (1, 4, 6.0)]",
        "2 [(2, 4, 6.0), (1, 2, 2.0), (2, 3, 3.0), (2, 4, 6.0)]",
        "3 [(3, 4, 6.0), (1, 2, 4.0), (0, 1, 3.0), (3, 4, 6.0)]",
    ]


def test_wrong_communicators_are_refused_where_they_are_passed(run_ranks, python, tmp_path):
    lines = check(
        run_ranks, python, tmp_path, 2,
        "for comm in ([1 - me], [0, 7], [0, 0], ['a'], MPI.COMM_NULL, 'world', 3):\n"
        "    try:\n"
        "        hvd.init(comm)\n"
        "    except ValueError as error:\n"
        "        assert not hvd.is_initialized()\n"
        "        if me == 0:\n"
        "            print(error, flush=True)\n",
    )  # fmt: skip
    assert len(lines) == 7
    assert any("rank 0 called init(comm=[1]) but is not in that list" in line for line in lines)
    assert any("ranks are 0 to 1, each named once" in line for line in lines)
    assert any("passed MPI.COMM_NULL" in line for line in lines)


def test_facts_that_scripts_ask_for(run_ranks, python, tmp_path):
    lines = check(
        run_ranks, python, tmp_path, 3,
        "hvd.init()\n"
        "print(hvd.is_homogeneous(), hvd.mpi_threads_supported(), hvd.mpi_enabled(),"
        " hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built(), flush=True)\n",
        "--ranks-per-node", "2",
    )  # fmt: skip
    library = gpu.library()
    kernels = library is not None and gpu.platform(library).startswith("CUDA")
    assert lines == [f"False True True True False 0 {kernels}"] * 3


SETS = """
def facts(s):
    return s.process_set_id, s.ranks, s.size(), s.rank(), s.included()

def total(s):
    mine = torch.tensor([float(hvd.rank())])
    return hvd.allreduce(mine, op=hvd.Sum, name="t", process_set=s).item()
"""


def test_process_sets_given_to_init_are_numbered_alike(run_ranks, python, tmp_path):
    lines = check(
        run_ranks, python, tmp_path, 3,
        SETS + "even, last = hvd.ProcessSet([2, 0]), hvd.ProcessSet([2])\n"
        "for _ in range(2):\n"  # the objects serve the next job too
        "    hvd.init(process_sets=[even, last])\n"
        "    found = [facts(even), facts(last), facts(hvd.global_process_set)]\n"
        "    found += [total(even)] if even.included() else []\n"
        "    try:\n"
        "        hvd.add_process_set([0, 1])\n"
        "    except ValueError as error:\n"
        "        assert 'HOROVOD_DYNAMIC_PROCESS_SETS=1' in str(error)\n"
        "    hvd.shutdown()\n"
        "    assert even.process_set_id is None\n"
        "print(me, found, flush=True)\n",
    )  # fmt: skip
    everyone = "(0, [0, 1, 2], 3, {}, True)"
    assert lines == [
        f"0 [(1, [0, 2], 2, 0, True), (2, [2], 1, None, False), {everyone.format(0)}, 2.0]",
        f"1 [(1, [0, 2], 2, None, False), (2, [2], 1, None, False), {everyone.format(1)}]",
        f"2 [(1, [0, 2], 2, 1, True), (2, [2], 1, 0, True), {everyone.format(2)}, 2.0]",
    ]


def test_communicators_become_process_sets(run_ranks, python, tmp_path):
    """What Split returned, as a ProcessSet and as one of a list of communicators."""
    lines = check(
        run_ranks, python, tmp_path, 4,
        SETS + "half = world.Split(me % 2, me)\n"
        "split = hvd.ProcessSet(half)\n"
        "hvd.init(comm=world, process_sets=[split])\n"
        "found = [facts(split), total(split)]\n"
        "hvd.shutdown()\n"
        "hvd.init(comm=[world, half])\n"
        "from qsgd_hpc.runtime.process_sets import process_set_ids_and_ranks\n"
        "print(me, found, process_set_ids_and_ranks(), flush=True)\n",
    )  # fmt: skip
    both = "{0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3]}"
    assert lines == [
        f"0 [(1, [0, 2], 2, 0, True), 2.0] {both}",
        f"1 [(2, [1, 3], 2, 0, True), 4.0] {both}",
        f"2 [(1, [0, 2], 2, 1, True), 2.0] {both}",
        f"3 [(2, [1, 3], 2, 1, True), 4.0] {both}",
    ]


@pytest.mark.gate
def test_sets_come_and_go_where_that_is_allowed(run_ranks, python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        TRAIN + SETS + "hvd.init()\n"
        "one = hvd.add_process_set([1])\n"
        "for wrong in ([1], [0, 1], [5]):\n"
        "    try:\n"
        "        hvd.add_process_set(wrong)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "assert hvd.remove_process_set(one) and not hvd.remove_process_set(one)\n"
        "assert not hvd.remove_process_set(hvd.global_process_set)\n"
        "assert hvd.add_process_set(hvd.ProcessSet([1])).ranks == [1]\n",
        encoding="utf-8",
    )
    done = run_ranks(2, python, str(script), HOROVOD_DYNAMIC_PROCESS_SETS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(set(done.stdout.splitlines())) == [
        "a process set with the ranks [0, 1] already exists: number 0",
        "a process set with the ranks [1] already exists: number 1",
        "rank 0: ProcessSet([5]) names rank 5, but the job has 2 ranks, from 0",
        "rank 1: ProcessSet([5]) names rank 5, but the job has 2 ranks, from 0",
    ]


@pytest.mark.one_mpi
def test_log_level_silences_warnings(run_ranks, python, tmp_path):
    body = (
        "import os, time\n"
        "hvd.init()\n"
        "if me: time.sleep(1.5)\n"
        "summed()\n"
    )  # fmt: skip
    script = tmp_path / "script.py"
    script.write_text(TRAIN + body, encoding="utf-8")
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    assert "warning" in run_ranks(2, python, str(script), **stall).stderr
    stall["HOROVOD_LOG_LEVEL"] = "error"
    assert "warning" not in run_ranks(2, python, str(script), **stall).stderr


def test_rank_is_the_launchers_own(run_ranks, python, tmp_path):
    """Scripts choose their GPU or their logging by the variable before they call init()."""
    lines = check(
        run_ranks, python, tmp_path, 3,
        "import os\n"
        "names = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK')\n"
        "theirs = [int(os.environ[name]) for name in names if name in os.environ]\n"
        "hvd.init()\n"
        "assert theirs and set(theirs) == {hvd.rank()}\n"
        "print(hvd.rank(), flush=True)\n",
    )  # fmt: skip
    assert lines == ["0", "1", "2"]
