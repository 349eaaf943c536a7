"""The script's own MPI beside the engine's, and several frameworks in one job."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MESSAGES = """
import threading
import numpy as np
{imports}

hvd.init()
world = MPI.COMM_WORLD
me, size = world.Get_rank(), world.Get_size()
assert (me, size) == (hvd.rank(), hvd.size())
assert hvd.mpi_threads_supported()

def own_messages(comm, found):
    "What a script does with mpi4py, from a thread of its own."
    for step in range(40):
        mine = np.full(1000, me + step, np.int64)
        everyone = np.empty_like(mine)
        comm.Allreduce(mine, everyone)
        others = comm.sendrecv(step, dest=(me + 1) % size, source=(me - 1) % size)
        total = size * step + size * (size - 1) // 2
        found.append(others == step and bool((everyone == total).all()))

found, loops = [], []
for comm in (world, world.Dup()):
    loops.append(threading.Thread(target=own_messages, args=(comm, found)))
    loops[-1].start()
sums = []
for step in range(40):
    mine = [np.full(count, step + me) for count in (1, 50_000)]
    handles = [hvd.allreduce_async(x, f"own{{x.size}}", op=hvd.Sum) for x in mine]
    sums += [set(hvd.synchronize(handle).tolist()) for handle in handles]
for loop in loops:
    loop.join()
right = [{{size * step + size * (size - 1) // 2}} for step in range(40) for _ in range(2)]
print(sums == right, len(found), all(found), flush=True)
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    "imports",
    [
        "from mpi4py import MPI\nimport qsgd_hpc.arrays as hvd",
        "import qsgd_hpc.arrays as hvd; hvd.init()\nfrom mpi4py import MPI",
    ],
    ids=["mpi4py-first", "engine-first"],
)
def test_mpi4py_communicates_while_the_engine_does(run_ranks, python, tmp_path, imports):
    script = tmp_path / "script.py"
    script.write_text(MESSAGES.format(imports=imports), encoding="utf-8")
    done = run_ranks(3, python, str(script), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[:-1] == ["True 80 True"] * 3


FRAMEWORKS = """
import importlib
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
me = world.Get_rank()
half = world.Split(me % 2, me)
modules = {name: importlib.import_module(f"qsgd_hpc.{name}") for name in NAMES}
tensors = {
    "arrays": lambda x: x,
    "torch": lambda x: __import__("torch").from_numpy(x),
    "tensorflow": lambda x: __import__("tensorflow").constant(x),
    "jax": lambda x: __import__("jax").numpy.asarray(x),
}

def sums(**options):
    found = {}
    for name, hvd in modules.items():
        mine = tensors[name](np.array([1.0 + me, 10.0], np.float32))
        reduced = hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{name}", **options)
        found[name] = np.asarray(reduced).tolist()
    assert len({tuple(each) for each in found.values()}) == 1, found
    return found["arrays"]

first = modules["arrays"]
first.init(comm=half)
assert all((hvd.rank(), hvd.size()) == (half.rank, half.size) for hvd in modules.values())
found = [sums()]
first.shutdown()
assert not any(hvd.is_initialized() for hvd in modules.values())
first.init(comm=[world, half])
found.append(sums())
first.shutdown()
part = first.ProcessSet([0, 2])
first.init(process_sets=[part])
assert all(hvd.mpi_threads_supported() for hvd in modules.values())
if part.included():
    found.append(sums(process_set=part))
print(me, found, flush=True)
"""


@pytest.mark.one_mpi
def test_frameworks_share_the_job_of_a_sub_communicator(run_ranks, python, tmp_path):
    """One engine for all of them, on halves of the ranks, and on process sets."""
    names = ["arrays", *(n for n in ("torch", "tensorflow", "jax") if usable(n))]
    script = tmp_path / "script.py"
    script.write_text(f"NAMES = {names!r}\n" + FRAMEWORKS, encoding="utf-8")
    done = run_ranks(3, python, str(script), timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line[0].isdigit()) == [
        "0 [[4.0, 20.0], [6.0, 30.0], [4.0, 20.0]]",
        "1 [[2.0, 10.0], [6.0, 30.0]]",
        "2 [[4.0, 20.0], [6.0, 30.0], [4.0, 20.0]]",
    ]


def usable(name: str) -> bool:
    return all(find_spec(each) is not None for each in (name, f"qsgd_hpc.{name}"))
