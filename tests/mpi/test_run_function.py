"""qsgd_hpc.run: a Python function on many ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launch(python, tmp_path):
    """Return launch(body): runs a script that calls qsgd_hpc.run, and returns how it ended."""

    def start(body: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "launch.py"
        script.write_text("import os, sys, qsgd_hpc\n" + body, encoding="utf-8")
        return subprocess.run(
            [python, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return start


@pytest.mark.gate
def test_results_come_back_by_rank_from_a_closure(launch):
    done = launch(
        "factor = 3\n"
        "def work(x, *, more):\n"
        "    import numpy as np, qsgd_hpc.arrays as hvd\n"
        "    hvd.init()\n"
        "    total = hvd.allreduce(np.ones(2), op=hvd.Sum, name='x')\n"
        "    return hvd.rank(), x * factor + more, total\n"
        "for rank, value, total in qsgd_hpc.run(work, (5,), {'more': 1}, np=3):\n"
        "    print(rank, value, total.tolist())\n"
        "print(qsgd_hpc.run(lambda: os.environ['QSGD_BITS'], np=1, bits=4))\n"
    )
    assert done.stdout.splitlines() == [
        "0 16 [3.0, 3.0]", "1 16 [3.0, 3.0]", "2 16 [3.0, 3.0]", "['4']"
    ], done.stderr  # fmt: skip


def test_functions_of_modules_beside_the_script_are_found(launch, tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    done = launch("import beside\nos.chdir('/')\nprint(qsgd_hpc.run(beside.answer, np=2))\n")
    assert done.stdout == "[42, 42]\n", done.stderr


@pytest.mark.gate
def test_the_rank_that_failed_first_is_named_with_its_traceback(launch):
    done = launch(
        "def work():\n"
        "    import numpy as np, qsgd_hpc.arrays as hvd\n"
        "    hvd.init()\n"
        "    if hvd.rank() == 1:\n"
        "        raise KeyError('no such thing')\n"
        "    hvd.allreduce(np.ones(2), name='x')\n"
        "try:\n"
        "    qsgd_hpc.run(work, np=2)\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__, type(error.__cause__).__name__)\n"
        "    print(str(error))\n"
    )
    first, message = done.stdout.split("\n", 1)
    assert first == "LaunchError KeyError", done.stderr
    assert "rank 1 failed" in message
    assert "raise KeyError('no such thing')" in message


def test_a_rank_that_is_killed_and_a_result_that_cannot_travel_are_told(launch):
    done = launch(
        "import threading\n"
        "def killed():\n"
        "    import os\n"
        "    if os.environ.get('PMI_RANK', os.environ.get('PMIX_RANK')) == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
        "for work in (killed, threading.Lock):\n"
        "    try:\n"
        "        qsgd_hpc.run(work, np=2)\n"
        "    except RuntimeError as error:\n"
        "        print(str(error).splitlines()[0], str(error).splitlines()[-1])\n"
    )
    first, second = done.stdout.splitlines()
    assert "code 137 and without a result of rank" in first
    assert "cannot pickle" in second


def test_what_ranks_print_is_kept_where_asked(launch, tmp_path):
    done = launch(
        "def work():\n"
        "    print('out'); print('err', file=sys.stderr)\n"
        "qsgd_hpc.run(work, np=2, output_filename='kept')\n"
    )
    assert done.stdout == "out\nout\n", done.stderr
    for rank in (0, 1):
        assert (tmp_path / "kept" / f"rank.{rank}" / "stdout").read_text() == "out\n"
        assert "err" in (tmp_path / "kept" / f"rank.{rank}" / "stderr").read_text()


@pytest.mark.one_mpi
def test_horovods_arguments_are_known_and_others_refused(launch):
    done = launch(
        "print(qsgd_hpc.run(os.getcwd, num_proc=1, use_gloo=True, ssh_port=22, min_np=None,"
        " max_num_proc=None, slots=None, cooldown_range=None, network_interface='lo',"
        " host_discovery_script=None))\n"
        "try: qsgd_hpc.run(os.getcwd, host_discovery_script='./hosts.sh')\n"
        "except ValueError as e: print(e)\n"
        "qsgd_hpc.run(os.getcwd, nump=2)\n"
    )
    assert "use_gloo=True: MPI starts the ranks" in done.stderr
    assert "ssh_port=22: mpiexec starts the ranks" in done.stderr
    assert "min_np" not in done.stderr
    assert "list them in hosts=" in done.stdout
    assert "TypeError: run() got an unexpected keyword argument 'nump'" in done.stderr


@pytest.mark.one_mpi
def test_horovods_name_holds_in_the_ranks_too(launch):
    done = launch(
        "from qsgd_hpc.horovod_compat import install\n"
        "install()\n"
        "import horovod\n"
        "def work():\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.size()\n"
        "print(horovod.run(work, np=2))\n"
    )
    assert done.stdout == "[2, 2]\n", done.stderr


@pytest.mark.one_mpi
def test_every_line_may_bear_the_time(run_ranks):
    done = run_ranks(2, "--prefix-output-with-timestamp", "echo", "hello")
    lines = sorted(line[20:] for line in done.stdout.splitlines())
    assert lines == ["[0] hello", "[1] hello"]
