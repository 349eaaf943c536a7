"""Scripts made for torchrun, unchanged: the ranks find each other, and train as under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.mpi.ecosystem import by_torchrun
from tests.processes import without_settings

# Trains, and prints of each rank how it was told where it is and the sum of its weights.
TRAINING = """
import json, os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
MODEL
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    own = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 10, generator=own)).square().mean().backward()
    optimizer.step()
weights = [float(WEIGHT.detach().sum()) for p in model.parameters()]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print(json.dumps([*(int(os.environ[n]) for n in names), weights]), flush=True)
del model, optimizer
dist.destroy_process_group()
"""
DDP = TRAINING.replace("MODEL", "model = DistributedDataParallel(torch.nn.Linear(10, 1))").replace(
    "WEIGHT", "p"
)
SHARDED = """
model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 1))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
"""
FSDP = TRAINING.replace("MODEL", SHARDED).replace("WEIGHT", "p.full_tensor()")
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([{number}])
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""
PLACE = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print(json.dumps([*(int(os.environ[n]) for n in names), os.environ["MASTER_ADDR"]]), flush=True)
"""


def places(text: str) -> list[list[object]]:
    # torchrun's processes may print on one line.
    return sorted(map(json.loads, re.findall(r"\[[^\[\]]*(?:\[[^\]]*\])?\]", text)))


@pytest.mark.parametrize("script", [pytest.param("ddp", marks=pytest.mark.gate), "fsdp"])
def test_a_script_trains_as_under_torchrun(run_ranks, tmp_path: Path, script: str) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text({"ddp": DDP, "fsdp": FSDP}[script])
    done = run_ranks(2, str(path))
    assert done.returncode == 0, done.stderr
    ours = places(done.stdout)
    assert [place[:5] for place in ours] == [[0, 2, 0, 2, 0], [1, 2, 1, 2, 0]]
    assert ours[0][5] == ours[1][5]
    assert places(by_torchrun(str(path))) == ours


@pytest.mark.gate
def test_each_rank_is_told_its_place(run_ranks, tmp_path: Path) -> None:
    path = tmp_path / "place.py"
    path.write_text(PLACE)
    done = run_ranks(3, "--ranks-per-node", "2", str(path), WORLD_SIZE="9", RANK="5")
    assert done.returncode == 0, done.stderr
    here = "127.0.0.1"
    expected = [[0, 3, 0, 2, 0, here], [1, 3, 1, 2, 0, here], [2, 3, 0, 1, 1, here]]
    assert places(done.stdout) == expected
    assert "WORLD_SIZE=9 was set before; the ranks get 3" in done.stderr


def test_ranks_on_hosts_of_their_own_meet_on_the_first(
    hosts_of_their_own: None, run_ranks, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(DDP)
    done = run_ranks(4, "--network", "1gbit", "--ranks-per-node", "2", str(path))
    assert done.returncode == 0, done.stderr
    assert [place[2:5] for place in places(done.stdout)] == [
        [0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]
    ]  # fmt: skip


def test_runs_at_once_never_meet(python: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for number in range(4):
        (tmp_path / f"sum{number}.py").write_text(SUM.format(number=10**number))
    runs = [
        subprocess.Popen(
            [python, "-m", "qsgd_hpc", "run", "-np", "2", str(tmp_path / f"sum{number}.py")],
            env=without_settings(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for number, run in enumerate(runs):
        out, err = run.communicate(timeout=240)
        assert run.returncode == 0, err
        assert out == f"sum {2 * 10**number}\n" * 2


# Averages over a group that is registered for the memory of GPUs alone, as NCCL's is, beside gloo.
CARRIED = """
import json, sys, torch, torch.distributed as dist
from unittest import mock
from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.ddp import QSGDState

dist.init_process_group(sys.argv[1])
state = QSGDState(None, 4, seed=3)
flat = torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank()))
bucket = mock.Mock()
bucket.buffer.return_value = flat
bucket.parameters.return_value = [torch.nn.Parameter(torch.zeros(50, 60))]
state.require_transport(flat)
state.reduce(bucket).wait()
owed = state.global_state_dict()["parameters"]["0"]["owed"]
said = ""
try:
    QSGDState(dist.new_group([0, 1], backend="cuda:gloo"), 4).require_transport(flat)
except UsageError as refused:
    said = str(refused)
print(json.dumps([float(flat.sum()), float(owed.abs().sum()), state.sent_bytes, said]), flush=True)
dist.destroy_process_group()
"""


def test_codes_find_a_way_where_the_group_carries_no_host_memory(run_ranks, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "average.py"
    path.write_text(CARRIED)
    answers = {}
    for backend in ("gloo", "cuda:gloo"):
        done = run_ranks(2, str(path), backend)
        assert done.returncode == 0, done.stderr
        answers[backend] = places(done.stdout)
        assert answers[backend][0] == answers[backend][1]
    assert answers["cuda:gloo"] == answers["gloo"]
    said = answers["gloo"][0][3]
    assert "backend='gloo' over the same ranks" in said


# Each rank by itself; or all in a group, but not in that of all.
ALONE = """
import sys, torch, torch.distributed as dist
if "group" in sys.argv:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "mpi" in sys.argv:
    from mpi4py import MPI
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ((), "call torch.distributed.init_process_group()"),
        (("group",), "remove world_size from init_process_group()"),
        (("--bits=4",), "call torch.distributed.init_process_group()"),
        (("mpi",), None),
        (("--no-torchrun",), None),
    ],
    ids=["no-group", "own-group", "bits", "mpi", "meant"],
)
def test_ranks_that_train_alone_are_told_once(
    run_ranks, tmp_path: Path, words: tuple[str, ...], remedy: str | None
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(ALONE)
    options = [word for word in words if word.startswith("--")]
    done = run_ranks(2, *options, str(path), *(w for w in words if w not in options))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc: ")]
    assert len(told) == (remedy is not None), done.stderr
    assert (remedy or "") in "".join(told)


# Starts ranks itself, and trains in their group or fails in it.
SPAWNING = """
import os, sys, torch, torch.distributed as dist
def train(_, store):
    if "fail" in sys.argv:
        dist.barrier()
    dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
    model = torch.nn.Linear(4, 1)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[0] + os.environ["RANK"],), 1)
"""


@pytest.mark.parametrize("words", [(), ("fail",)], ids=["trains", "fails"])
def test_a_script_that_starts_its_ranks_itself_is_answered_with_one_rank(
    run_ranks, tmp_path: Path, words: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SPAWNING)
    done = run_ranks(2, str(path), *words)
    assert done.returncode == len(words), done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc: ")]
    assert told, done.stderr
    assert all("each of them: start it with -np 1" in line for line in told)


# As Lightning's "ddp_spawn" does. Whichever has the port stays until the other has failed.
TAKING_PLACE = """
import time, torch, torch.distributed as dist
def train(_):
    dist.init_process_group("gloo")
    time.sleep(600)
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


def test_processes_that_all_take_the_place_of_their_rank_are_explained(
    run_ranks, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(TAKING_PLACE)
    done = run_ranks(1, str(path))
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc: ")]
    assert len(told) == 1 and "add --no-torchrun" in told[0], done.stderr


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("CUDA error: invalid device ordinal", "LOCAL_RANK=1 is not a GPU that this rank sees ("),
        ("EADDRINUSE: port: 47, ...", "MASTER_PORT=47 is in use by another process on here: unset"),
        ("Distributed package doesn't have MPI built in.", 'use backend="gloo" on CPUs'),
        ("[Errno 98] Address already in use", None),
        ("CUDA error: out of memory", None),
    ],
    ids=["no such GPU", "taken port", "mpi", "another port", "another error"],
)
def test_an_error_of_how_ranks_were_started_comes_with_its_remedy(
    run_ranks, tmp_path: Path, text: str, remedy: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import os\nif os.environ['RANK'] == '1': raise RuntimeError({text!r})\n")
    place = {"MASTER_ADDR": "here", "MASTER_PORT": "47", "CUDA_VISIBLE_DEVICES": "3"}
    done = run_ranks(2, str(path), **place)
    assert done.returncode == 1
    assert f"RuntimeError: {text}" in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("qsgd-hpc: ")]
    assert len(said) == (remedy is not None), done.stderr
    assert (remedy or "") in "".join(said)
