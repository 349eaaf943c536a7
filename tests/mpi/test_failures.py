"""What goes wrong on one rank ends in a clear error on all, never in a hang or a wrong number."""

from __future__ import annotations

import time

import psutil
import pytest

# Arrays: what is tested lies below the frameworks, and each takes seconds to import on every rank.
PREAMBLE = """
import os, signal, sys, time
import numpy as np
import qsgd_hpc.arrays as hvd
hvd.init()
me, last = hvd.rank(), hvd.size() - 1
coded = hvd.Compression.qsgd(bits=4)
def step(i, n=500_000):
    return hvd.allreduce(np.ones(n, np.float32), name=f"layer{i % 3}", compression=coded)
"""

# Far less than the ranks would go on for, and enough for a busy machine.
ENDED_WITHIN_S = 120


@pytest.fixture
def play(run_ranks, python, tmp_path):
    """Run a script on ranks; return the finished process and how long it took."""

    def run(ranks: int, body: str, **environ: str):
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + body)
        start_s = time.monotonic()
        done = run_ranks(ranks, python, str(script), **environ)
        return done, time.monotonic() - start_s

    return run


@pytest.mark.gate
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.gate(mpi=2))])
def test_a_killed_rank_is_named_by_the_others_and_ends_the_job(play, victim):
    done, seconds = play(
        3,
        f"""
for i in range(100_000):
    step(i)
    if i == 30 and me == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode == 128 + 9
    assert f"rank {victim}" in done.stderr.splitlines()[-1]
    assert "SIGKILL" in done.stderr
    errors = [line for line in done.stderr.splitlines() if "RankFailedError" in line]
    assert errors, done.stderr
    assert all(f"rank {victim} (host" in line and "died" in line for line in errors)
    assert seconds < ENDED_WITHIN_S


@pytest.mark.one_mpi
def test_a_rank_that_computes_on_is_ended_too(play):
    done, seconds = play(
        2,
        """
if me == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
""",
    )
    assert done.returncode == 128 + 9
    assert seconds < ENDED_WITHIN_S


@pytest.mark.gate
def test_an_exception_on_one_rank_ends_all_with_its_text(play):
    done, _ = play(
        3,
        """
for i in range(100_000):
    if i == 30 and me == 1:
        raise ValueError("bad batch in file 17")
    step(i)
""",
    )
    assert done.returncode == 1
    assert "ValueError: bad batch in file 17" in done.stderr
    assert "rank 1 left the job (it ended with ValueError: bad batch in file 17)" in done.stderr


def test_an_exception_reaches_ranks_that_are_busy_elsewhere(play):
    """They compute, or sit in an MPI call of their own: the failed rank must not wait for ever."""
    done, seconds = play(
        2,
        """
if me == 1:
    raise ValueError("disk full")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
    )
    assert done.returncode == 1
    assert "ValueError: disk full" in done.stderr
    assert seconds < ENDED_WITHIN_S


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    "text",
    [
        "'x' * 70_000",
        pytest.param("'é' * 5_000", marks=pytest.mark.gate),
        "os.fsdecode(b'file\\xff')",
    ],
)
def test_any_error_text_reaches_the_others(play, text):
    done, _ = play(
        2,
        f"""
if me == 0:
    raise ValueError({text})
step(0)
""",
    )
    assert done.returncode == 1
    assert "rank 0 left the job (it ended with ValueError: " in done.stderr


@pytest.mark.gate
def test_a_survivor_may_save_and_end_but_not_start_again(play):
    done, _ = play(
        2,
        """
try:
    for i in range(100_000):
        step(i)
        if i == 30 and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except hvd.RankFailedError:
    hvd.shutdown()
    try:
        hvd.init()
    except hvd.RankFailedError as error:
        print("refused:", error, flush=True)
    print("saved", flush=True)
""",
    )
    assert done.returncode == 128 + 9
    assert "refused: a rank of this job has died" in done.stdout
    assert "saved" in done.stdout


@pytest.mark.gate
def test_a_forked_child_knows_its_rank_and_cannot_communicate(play):
    done, _ = play(
        2,
        """
child = os.fork()
if child == 0:
    print(f"child of {hvd.rank()} of {hvd.size()}", flush=True)
    try:
        hvd.allreduce(np.ones(3))
    except hvd.UsageError as error:
        print("child:", error, flush=True)
    sys.exit(0)
os.waitpid(child, 0)
step(1)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was forked from rank") == 2
    assert all(f"child of {rank} of 2" in done.stdout for rank in range(2))


@pytest.mark.gate
def test_a_rank_that_has_fewer_steps_is_named(play):
    done, _ = play(2, "for i in range(10 - me):\n    step(i)\n")
    assert done.returncode == 1
    assert "rank 1 left the job (its script ended) without submitting tensor" in done.stderr


def test_a_rank_stopped_for_a_while_is_not_taken_for_dead(play):
    done, _ = play(
        2,
        """
import subprocess
for i in range(60):
    step(i)
    if i == 30 and me == 1:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
print("finished", me, flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "finished 0" in done.stdout
    assert "finished 1" in done.stdout


@pytest.mark.gate
def test_nan_on_one_rank_is_reported_by_all(play):
    done, _ = play(
        2,
        """
x = np.ones((100, 100), np.float32)
if me == 1:
    x[3, 4] = float("nan")
hvd.allreduce(x, name="fc.weight", compression=coded)
""",
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "NonFiniteGradientError" in line]
    assert len(errors) == 2
    assert all("'allreduce.fc.weight'" in line and "rank(s) 1" in line for line in errors)


@pytest.mark.gate
def test_settings_that_differ_between_ranks_are_refused_at_init(run_ranks, python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "rank = next(os.environ[n] for n in ('PMI_RANK', 'OMPI_COMM_WORLD_RANK')"
        " if n in os.environ)\n"
        "os.environ['QSGD_SEED'] = rank\n"
        "import qsgd_hpc.arrays as hvd\n"
        "hvd.init()\n"
    )
    done = run_ranks(2, python, str(script))
    assert done.returncode == 1
    assert "QSGD_SEED is 1 on rank 1 and 0 on rank 0" in done.stderr


@pytest.mark.gate
def test_bad_settings_name_the_variable_before_a_rank_starts(play):
    done, _ = play(2, "", QSGD_NORM="l3")
    assert done.returncode == 2
    assert "QSGD_NORM='l3': expected one of max, l2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_setting_is_named_once_for_all_ranks(play):
    done, _ = play(2, "step(0)\n", QSGD_BIT="4", QSGD_MINE="1")
    assert done.returncode == 0
    assert done.stderr.count("QSGD_BIT is not a setting and has no effect. Did you mean QSGD_") == 1
    assert "QSGD_MINE" not in done.stderr


@pytest.mark.gate
def test_a_thread_level_that_is_too_low_is_named(run_ranks, python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import mpi4py\n"
        "mpi4py.rc.thread_level = 'serialized'\n"
        "from mpi4py import MPI\n"
        "import qsgd_hpc.arrays as hvd\n"
        "hvd.init()\n"
    )
    done = run_ranks(2, python, str(script))
    assert done.returncode == 1
    assert "MPI_THREAD_MULTIPLE" in done.stderr


@pytest.mark.one_mpi
def test_a_forked_loader_does_not_hide_a_death(play, tmp_path):
    """A data loader's process inherits the sockets; it must not keep the dead rank's alive."""
    file = tmp_path / "loader"
    done, seconds = play(
        2,
        f"""
if me == 1:
    loader = os.fork()
    if loader == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    open({str(file)!r}, "w").write(str(loader))
    os.kill(os.getpid(), signal.SIGKILL)
for i in range(100_000):
    step(i)
""",
    )
    assert done.returncode == 128 + 9
    assert "rank 1 (host" in done.stderr
    assert seconds < ENDED_WITHIN_S
    assert not psutil.pid_exists(int(file.read_text())), "it ends with its rank"


DEATH_IN_A_DIRECT_ALLREDUCE = """
import os, signal
import numpy as np
from qsgd_hpc.runtime import direct
from qsgd_hpc.errors import RankFailedError

def reduce(algorithm, victim=1):
    with direct.communicator() as c:
        x = np.zeros(1_000_000, np.float32)
        for i in range(100_000):
            if i == 30 and c.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            c.allreduce([x], algorithm=algorithm)

"""


@pytest.mark.parametrize("algorithm", ["shared", "direct"])
def test_a_death_during_a_direct_allreduce_is_named(run_ranks, python, tmp_path, algorithm):
    """Ranks that wait for shared memory have no message that could fail."""
    script = tmp_path / "script.py"
    script.write_text(f"{DEATH_IN_A_DIRECT_ALLREDUCE}reduce({algorithm!r})\n")
    start_s = time.monotonic()
    done = run_ranks(3, python, str(script))
    assert done.returncode == 128 + 9
    assert "rank 1 (host" in done.stderr
    assert time.monotonic() - start_s < ENDED_WITHIN_S


@pytest.mark.gate
@pytest.mark.parametrize("algorithm", ["shared", "direct"])
def test_survivors_of_a_death_during_a_direct_allreduce_may_save_and_end(
    run_ranks, python, tmp_path, algorithm
):
    script = tmp_path / "script.py"
    script.write_text(
        f"{DEATH_IN_A_DIRECT_ALLREDUCE}"
        f"try: reduce({algorithm!r})\n"
        "except RankFailedError as error: print('saved:', error)\n"
    )
    start_s = time.monotonic()
    done = run_ranks(3, python, str(script))
    assert done.returncode == 128 + 9
    assert done.stdout.count("saved: rank 1 (host") == 2
    assert time.monotonic() - start_s < ENDED_WITHIN_S


@pytest.mark.one_mpi
@pytest.mark.parametrize("victim", [1, 7])
def test_a_death_is_named_on_the_other_side_of_the_tree(run_ranks, python, tmp_path, victim):
    """Each rank a node: 1 and 2 are below 0, 7 is below 3, and that below 1."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{DEATH_IN_A_DIRECT_ALLREDUCE}"
        f"try: reduce('direct', {victim})\n"
        "except RankFailedError as error: print('saved:', error)\n"
    )
    done = run_ranks(8, python, str(script), QSGD_RANKS_PER_NODE="1", QSGD_FAN_OUT="2")
    assert done.returncode == 128 + 9
    assert done.stdout.count(f"saved: rank {victim} (host") == 7, done.stdout


DEATH_IN_TRAINING = """
import os, signal, sys
import numpy as np
import qsgd_hpc.arrays as hvd
from qsgd_hpc.errors import RankFailedError

hvd.init()
try:
    for step in range(100_000):
        if step == 3 and hvd.rank() == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(100, np.float32), name="gradient")
except RankFailedError as error:
    print("saved:", error)
"""


@pytest.mark.one_mpi
@pytest.mark.parametrize("victim", [0, 4, 63])
def test_a_death_is_named_on_16_nodes_of_4(run_ranks, python, tmp_path, victim):
    """Rank 4 leads a node, and the leaders of seven others are below it; 63 is a leaf there."""
    script = tmp_path / "script.py"
    script.write_text(DEATH_IN_TRAINING)
    done = run_ranks(
        64, python, str(script), str(victim), QSGD_RANKS_PER_NODE="4", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 128 + 9
    assert done.stdout.count(f"saved: rank {victim} (host") == 63, done.stdout
