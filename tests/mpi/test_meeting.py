"""Ranks that a launcher starts together meet in MPI, or end with an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import without_settings

pytestmark = pytest.mark.gate

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("standing_in.py")
TRAIN = """
from qsgd_hpc.runtime import basics
basics.init()
print(f"trained as {basics.rank()} of {basics.size()}", flush=True)
"""
ALIAS = """
import horovod.torch as hvd
hvd.init()
print(f"trained as {hvd.rank()} of {hvd.size()}", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, python: str):
    """Return start(launcher, ranks): TRAIN under a stand-in, or under the words of a real one."""

    def run(
        launcher: str | list[str], ranks: int = 2, script: str = TRAIN, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "train.py"
        file.write_text(script)
        before = [sys.executable, str(STAND_IN), launcher, str(ranks)]
        return subprocess.run(
            [*(before if isinstance(launcher, str) else launcher), python, str(file)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            # Open MPI's ranks that no launcher serves leave their shared memory behind.
            env={**without_settings(), "OMPI_MCA_btl": "^sm", **environ},
        )

    return run


def libmpi(python: str) -> str:
    return str(Path(python).parents[1] / "lib" / "libmpi.so")


@pytest.mark.gate(mpi=2)
@pytest.mark.parametrize(
    ("launcher", "word"),
    [
        ("pals", "mpiexec of PALS (PALS_"),
        ("srun", "srun (SLURM_STEP_NUM_TASKS=2)"),
        ("submit", "qsgd-hpc (QSGD_RANKS=2)"),
    ],
)
def test_ranks_that_never_met_end_with_the_reason_and_the_remedy(start, python, launcher, word):
    done = start(launcher)
    assert done.returncode == 1
    assert "trained" not in done.stdout
    assert done.stderr.count("UsageError: ") == 2, done.stderr
    assert done.stderr.count("but MPI sees this one alone") == 2
    assert f"launcher: {word}" in done.stderr
    assert f"installed by pip ({libmpi(python)}" in done.stderr
    assert done.stderr.count("remedy: ") == 2
    assert "or: QSGD_ALLOW_SINGLETON=1" in done.stderr


def test_ranks_that_are_meant_to_be_apart_say_so(start):
    done = start("srun", QSGD_ALLOW_SINGLETON="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained as 0 of 1") == 2


@pytest.mark.parametrize("launcher", ["nothing", "salloc", "sbatch"])
def test_a_single_process_trains_wherever_no_launcher_has_started_more(start, launcher):
    done = start(launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained as 0 of 1") == 2


def test_a_horovod_script_is_told_the_same(start):
    folder = ROOT / "qsgd_hpc" / "horovod_compat" / "on_path"
    done = start("srun", script=ALIAS, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))
    assert done.returncode == 1
    assert "trained" not in done.stdout
    assert done.stderr.count("but MPI sees this one alone") == 2, done.stderr


@pytest.mark.gate(mpi=2)
def test_ranks_under_the_mpiexec_of_another_mpi_do_not_train(start, python):
    pythons = os.environ.get("QSGD_TEST_PYTHON", "").split(os.pathsep)
    others = [each for each in pythons if each and each != python]
    if not others:
        pytest.skip("there is one MPI here")
    mpiexec = Path(others[0]).with_name("mpiexec")
    flags = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in others[0] else []
    done = start([str(mpiexec), *flags, "-n", "2"])
    assert done.returncode != 0
    assert "trained" not in done.stdout
    if "openmpi" in python:  # the other pair ends in MPI_Init
        assert "launcher: mpiexec of the MPICH family (PMI_SIZE=2)" in done.stderr, done.stderr
        assert (
            "remedy: start the ranks with `qsgd-hpc run`, or with this MPI's own mpiexec"
            in done.stderr
        )


LATE = """
import os, sys, time
from pathlib import Path
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
while rank == 1 and not Path(sys.argv[1]).exists():
    time.sleep(0.05)
from qsgd_hpc.runtime import basics
basics.init()
print(f"trained as {basics.rank()} of {basics.size()}", flush=True)
"""


def test_a_rank_that_does_not_call_init_is_named_and_the_job_goes_on_when_it_does(tmp_path, python):
    script, go = tmp_path / "late.py", tmp_path / "go"
    script.write_text(LATE)
    process = subprocess.Popen(
        [python, "-m", "qsgd_hpc", "run", "-np", "3", python, str(script), str(go)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**without_settings(), "QSGD_STALL_WARNING_S": "0.5"},
    )
    told: list[str] = []

    def read() -> None:
        for line in process.stderr:
            told.append(line)
            # Those who come later than the first are not missing for long.
            if ": rank 1 of the 3 on host" in line and "has not called it" in line:
                go.touch()

    reader = threading.Thread(target=read)
    reader.start()
    out = process.stdout.read()
    reader.join()
    assert process.wait() == 0, "".join(told)
    assert go.exists(), "".join(told)
    assert sorted(out.splitlines()) == [f"trained as {r} of 3" for r in range(3)]


# A port scanner is quicker than the other rank: connections that say nothing, and some that do.
SCANNED = """
import socket
connect, strangers = socket.create_connection, []
def scanned(address, *args, **options):
    for said in 20 * [b""] + [b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(64), b"x"]:
        strangers.append(connect(address))
        strangers[-1].sendall(said)
    return connect(address, *args, **options)
socket.create_connection = scanned
from qsgd_hpc.runtime import basics
basics.init()
print(f"trained as {basics.rank()} of {basics.size()} among {len(strangers)}", flush=True)
"""


def test_ranks_meet_at_once_though_strangers_come_first_and_say_nothing(
    run_ranks, python, tmp_path
):
    script = tmp_path / "scanned.py"
    script.write_text(SCANNED)
    done = run_ranks(2, python, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "trained as 0 of 2 among 0",
        "trained as 1 of 2 among 23",
    ]
    assert "cannot be named" not in done.stderr
