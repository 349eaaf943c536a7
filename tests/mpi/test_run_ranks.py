"""``qsgd-hpc run`` with real ranks, under the Pythons (and so the MPIs) of QSGD_TEST_PYTHON."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import without_settings

pytestmark = pytest.mark.gate

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


class Shell:
    """Run the command line with one interpreter, in a folder of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.environ = {
            **without_settings(),
            "PYTHONPATH": str(ROOT),
            "QSGD_RUN_GRACE_S": "3",
        }

    def argv(self, *args: str) -> list[str]:
        return [self.python, "-m", "qsgd_hpc", "run", *args]

    def run(
        self, *args: str, stdin: str | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*args),
            cwd=self.folder,
            env={**self.environ, **environ},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*args),
            cwd=self.folder,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name


@pytest.fixture
def shell(python: str, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(python, tmp_path)
    assert _alive(tmp_path) == [], "a process of the run outlived it"


def _alive(folder: Path) -> list[int]:
    """Return processes that work in the folder, after a moment to vanish."""
    deadline_s = time.monotonic() + 60
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                    found.append(int(entry.name))
            except OSError:
                continue
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


HELLO = """
import os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank)
bits = os.environ.get("QSGD_BITS")
# One write: the pasted dry run has nobody that keeps lines whole.
sys.stdout.write(f"{comm.rank} {comm.size} {total} {bits} {sys.argv[1:]}\\n")
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate(mpi=2)), 4])
def test_ranks_form_one_world_and_get_their_arguments(shell: Shell, ranks: int) -> None:
    done = shell.run("-np", str(ranks), "--bits", "4", shell.script(HELLO), "-np", "x y", "--env")
    assert done.returncode == 0, done.stderr
    total = sum(range(ranks))
    expected = [f"{r} {ranks} {total} 4 ['-np', 'x y', '--env']" for r in range(ranks)]
    assert sorted(done.stdout.splitlines()) == expected
    assert done.stderr == ""


@pytest.mark.gate(mpi=2)
def test_sets_have_the_same_order_on_all_ranks(shell: Shell) -> None:
    script = shell.script("print(list({str(word) for word in range(50)}))\n")
    done = shell.run("-np", "2", script)
    orders = done.stdout.splitlines()
    assert len(orders) == 2 and len(set(orders)) == 1, orders


def test_a_path_with_spaces_and_quotes_works(shell: Shell) -> None:
    name = shell.script(HELLO, 'it\'s a "script" $HOME.py')
    done = shell.run("-np", "2", "-H", "localhost:2", name)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


def test_no_argument_of_the_program_is_touched(shell: Shell) -> None:
    arguments = [":", "", "two\nlines", "$HOME", "*", "é", "-n", "--", "it's", '"', "\\"]
    script = shell.script("import sys\nprint(ascii(sys.argv[1:]))\n")
    done = shell.run("-np", "2", script, *arguments)
    assert done.stdout.splitlines() == [ascii(arguments)] * 2, done.stderr


def test_the_first_exit_code_and_its_rank_are_reported(shell: Shell) -> None:
    script = shell.script(
        "import os, time\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        "if rank == 1: os._exit(3)\ntime.sleep(1)\n"
        "os.write(1, b'survivor %d\\n' % rank)\nos._exit(1)"  # at once: ranks share the pipe
    )
    done = shell.run("-np", "3", script)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["survivor 0", "survivor 2"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("qsgd-hpc run: rank 1 on host ")
    assert "exited with code 3; ranks 0, 2 ended after it" in line


@pytest.mark.one_mpi
def test_a_rank_that_calls_exit_is_named_before_those_that_it_leaves(shell: Shell) -> None:
    script = shell.script(
        "import sys\nimport numpy as np\nimport qsgd_hpc.arrays as hvd\nhvd.init()\n"
        "hvd.allreduce(np.ones(8, 'f4'), name='a')\n"
        "if hvd.rank() == 1: sys.exit(3)\n"
        "hvd.allreduce(np.ones(8, 'f4'), name='a')\n"
    )
    done = shell.run("-np", "3", script)
    assert done.returncode == 3, done.stderr
    assert "exited with code 3; ranks 0, 2 ended after it" in done.stderr.splitlines()[-1]


def test_a_rank_killed_in_mid_allreduce_is_named_and_the_rest_end_in_time(shell: Shell) -> None:
    script = shell.script(
        "import os, time\nimport numpy as np\nfrom mpi4py import MPI\n"
        "comm, x, begin = MPI.COMM_WORLD, np.ones(1000), time.time()\n"
        "while True:\n"
        "    comm.Allreduce(x, np.empty(1000))\n"
        "    if comm.rank == 1 and time.time() > begin + 1: os.kill(os.getpid(), 9)\n"
    )
    done = shell.run("-np", "3", script)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 on host " in done.stderr.splitlines()[-1]
    assert "was killed by SIGKILL (out of memory" in done.stderr
    assert "ranks 0, 2 were still running 3 s later and were ended" in done.stderr


def test_programs_without_mpi_run_too(shell: Shell) -> None:
    done = shell.run("-np", "2", "sh", "-c", "echo out; echo err >&2; exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\nout\n", "err\nerr\n")


def test_ranks_that_still_run_long_after_one_has_succeeded_are_named(shell: Shell) -> None:
    script = shell.script(
        "import os, pathlib, time\n"
        "while os.environ['RANK'] != '1' and not pathlib.Path('end').exists(): time.sleep(0.05)\n"
    )
    with shell.start("-np", "3", script, QSGD_STALL_WARNING_S="0.2") as running:
        assert running.stderr
        line = running.stderr.readline()
        (shell.folder / "end").touch()
        assert (running.wait(TIMEOUT_S), running.stderr.read()) == (0, "")
    assert "warning: rank 1 exited with code 0 0.2 s ago, but ranks 0, 2 still run." in line


def test_mpi_abort_ends_every_rank_with_its_code(shell: Shell) -> None:
    script = shell.script(
        "import time\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1: MPI.COMM_WORLD.Abort(7)\ntime.sleep(600)\n"
    )
    done = shell.run("-np", "2", script)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith("qsgd-hpc run: ")


NOISE = """
import os, random, sys
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
random.seed(rank)
for i in range(100):
    line = b"%d:%d:" % (rank, i) + b"ABCD"[rank:rank + 1] * random.choice([1, 50, 5000, 70000])
    sys.stdout.buffer.write(line + b"\\n")
    if i % 7 == 0:
        sys.stdout.flush()
"""


def test_no_line_is_lost_or_mixed_however_much_ranks_print(shell: Shell) -> None:
    done = shell.run("-np", "4", "--prefix-output", shell.script(NOISE))
    assert done.returncode == 0, done.stderr
    next_line = dict.fromkeys(range(4), 0)
    for line in done.stdout.splitlines():
        label, _, text = line.partition(" ")
        rank, number, letters = text.split(":")
        assert label == f"[{rank}]"
        assert int(number) == next_line[int(rank)]
        assert set(letters) == {"ABCD"[int(rank)]} and len(letters) in (1, 50, 5000, 70000)
        next_line[int(rank)] += 1
    assert set(next_line.values()) == {100}


def test_binary_output_passes_unchanged(shell: Shell) -> None:
    script = shell.script(
        "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 20000)\nsys.stdout.flush()\n"
    )
    done = subprocess.run(
        shell.argv("-np", "1", script),
        cwd=shell.folder,
        env=shell.environ,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == bytes(range(256)) * 20000


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_ranks_and_their_children(
    shell: Shell, signum: signal.Signals, code: int
) -> None:
    process = shell.start("-np", "2", "bash", "-c", "echo up; sleep 600; echo no")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (code, "")
    assert "every rank has been ended" in err


def test_a_run_under_nohup_outlives_its_terminal(shell: Shell) -> None:
    argv = shlex.join(shell.argv("-np", "1", "bash", "-c", "echo up; read < go; echo done"))
    os.mkfifo(shell.folder / "go")
    process = subprocess.Popen(
        ["bash", "-c", f"trap '' HUP; exec {argv}"],
        cwd=shell.folder,
        env=shell.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGHUP)
    (shell.folder / "go").write_text("on\n")  # blocks until the rank reads
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "done\n")


def test_a_run_in_a_rank_of_another_meets_at_a_place_of_its_own(shell: Shell) -> None:
    names = ["MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]
    script = shell.script(
        "import os, subprocess, sys\n"
        f"print(*(os.environ.get(name, 'none') for name in {names}), flush=True)\n"
        "if len(sys.argv) > 1:\n"
        "    run = [sys.executable, '-m', 'qsgd_hpc', 'run', '-np', '2']\n"
        "    sys.exit(subprocess.call([*run, *sys.argv[2:], sys.argv[0]]))\n"
    )
    done = shell.run("-np", "1", script, "inner")
    assert (done.returncode, done.stderr) == (0, "")
    outer, *inner = [line.split() for line in done.stdout.splitlines()]
    assert len(inner) == 2
    assert inner[0] == inner[1]
    assert inner[0][1] == "2"
    assert not set(outer) & set(inner[0])
    done = shell.run("-np", "1", script, "inner", "--no-torchrun")
    assert done.stdout.splitlines()[1:] == ["none none none"] * 2


def test_ranks_have_their_own_numbers_in_a_shell_that_is_a_rank(shell: Shell) -> None:
    names = ("PMIX", "OMPI_COMM_WORLD", "PMI")
    outer = {f"{name}_RANK": "0" for name in names} | {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}
    words = ("bash", "-c", "echo $RANK $LOCAL_RANK")
    done = shell.run("-np", "2", "--prefix-output", *words, **outer)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0", "[1] 1 1"]


def test_a_full_disk_ends_the_run_with_the_reason(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            shell.argv("-np", "2", "bash", "-c", "echo up; sleep 600"),
            cwd=shell.folder,
            env=shell.environ,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "qsgd-hpc run: the output cannot be written (No space left on device); "
        "every rank was ended\n"
    )


def test_a_full_disk_below_the_files_of_ranks_does_not_end_them(shell: Shell) -> None:
    (shell.folder / "ranks" / "rank.1").mkdir(parents=True)
    (shell.folder / "ranks" / "rank.1" / "stdout").symlink_to("/dev/full")
    done = shell.run("-np", "2", "--output-filename", "ranks", "bash", "-c", "echo $RANK; echo on")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "1", "on", "on"])
    assert done.stderr == (
        "qsgd-hpc run: --output-filename ranks: No space left on device; its files lack all "
        "further output\n"
    )


def test_a_rank_that_ignores_sigterm_is_killed(shell: Shell) -> None:
    process = shell.start("-np", "2", "bash", "-c", "trap '' TERM; echo up; sleep 600; sleep 600")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143


def test_ranks_that_handle_sigterm_have_time_for_a_checkpoint(shell: Shell) -> None:
    script = shell.script(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(85)))\n"
        "print('up', flush=True)\nwhile True: signal.pause()\n"
    )
    process = shell.start("-np", "2", script)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.terminate()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (
        85,
        "qsgd-hpc run: the training stopped at a checkpoint (exit code 85)\n",
    )


def test_nothing_survives_a_launcher_killed_outright(shell: Shell) -> None:
    process = shell.start("-np", "2", "bash", "-c", "echo up; sleep 600; echo no")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.kill()
    process.communicate(timeout=TIMEOUT_S)


def test_a_signal_for_the_program_reaches_its_handler(shell: Shell) -> None:
    script = shell.script(
        "import signal, sys\nsignal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\nsignal.pause()\n"
    )
    process = shell.start("-np", "2", script)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, "")


def test_what_a_rank_leaves_behind_is_ended_with_it(shell: Shell) -> None:
    done = shell.run("-np", "2", "bash", "-c", "sleep 600 & echo left")
    assert (done.returncode, done.stdout) == (0, "left\nleft\n")


def test_a_daemon_of_a_rank_is_ended_with_it(shell: Shell) -> None:
    """It holds all that the rank had open, and no signal to the rank's group reaches it."""
    script = shell.script(
        "import os, pathlib, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    pathlib.Path(f\"daemon{os.environ['RANK']}\").write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not pathlib.Path(f\"daemon{os.environ['RANK']}\").exists(): time.sleep(0.01)\n"
    )
    done = shell.run("-np", "2", script)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(2):
        assert not psutil.pid_exists(int((shell.folder / f"daemon{rank}").read_text()))


def test_stdin_is_empty(shell: Shell) -> None:
    done = shell.run("-np", "2", "sh", "-c", "wc -c")
    assert done.stdout.split() == ["0", "0"]


def test_every_rank_gets_a_program_that_comes_on_stdin(shell: Shell) -> None:
    program = """# Längs: 'x' "y" $z `w` : ;
import sys
from mpi4py import MPI
print(MPI.COMM_WORLD.Get_size(), sys.argv, repr("\\n"), "ä")
raise SystemExit(3)
"""
    done = shell.run("-np", "2", shell.python, "-u", "-", "a", "b c", stdin=program)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == 2 * ["2 ['-', 'a', 'b c'] '\\n' ä"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-np", "0", "true"], "at least 1 rank"),
        (["-np", "two", "true"], "not a valid integer"),
        (["-np", "2"], "no command given"),
        (["-np", "2", "no-such-program-here"], "not in PATH"),
        (["-np", "2", "scrip.py"], "Did you mean 'script.py'"),
        (["-np", "2", "--bits", "9", "true"], "choose 1 to 8"),
        (["-np", "2", "-H", "no-such-host.invalid:2", "true"], "'no-such-host.invalid'"),
        (["-np", "3", "-H", "localhost:2", "true"], "needs 3 slots, the hosts have 2"),
        (["-np", "2", "--hostfile", "none", "true"], "No such file"),
        (["-np", "2", "--env", "QSGD_BITS=9", "true"], "QSGD_BITS='9'"),
    ],
)
def test_bad_input_is_answered_without_traceback(shell: Shell, args: list[str], words: str) -> None:
    shell.script("")
    done = shell.run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_dry_run_prints_a_command_that_runs_as_it_is(shell: Shell) -> None:
    script = shell.script(HELLO, "a b.py")
    shown = shell.run("-np", "2", "--bits", "8", "--dry-run", script, "it's")
    assert shown.returncode == 0, shown.stderr
    done = subprocess.run(
        ["bash", "-c", shown.stdout],
        cwd=shell.folder,
        env=shell.environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert sorted(done.stdout.splitlines()) == [f'{r} 2 1 8 ["it\'s"]' for r in (0, 1)]


def test_verbose_names_the_mpi_and_its_mpiexec(shell: Shell) -> None:
    done = shell.run("-np", "1", "-v", "true")
    assert done.returncode == 0
    assert "MPI: " in done.stderr and "mpiexec: " in done.stderr


def test_a_reader_that_leaves_ends_the_run_quietly(shell: Shell) -> None:
    command = f"{shell.python} -m qsgd_hpc run -np 2 sh -c 'while :; do echo y; done' | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=shell.folder,
        env=shell.environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "y\n", "")


HOLDS = """
import os, signal, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.allreduce(1)
with open("/proc/self/maps") as lines:
    mapped = {line.split()[-1] for line in lines if "/dev/shm/" in line}
everyones = set().union(*comm.allgather({f for f in mapped if os.path.exists(f)}))
if comm.rank == 0:
    print(*everyones, flush=True)
comm.Barrier()
if sys.argv[1] == "dies" and comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_memory_of_killed_ranks_is_given_back_and_that_of_other_runs_stays(shell: Shell) -> None:
    script = shell.script(HOLDS)
    other = shell.start("-np", "2", script, "stays")
    assert other.stdout is not None
    kept = {Path(word) for word in other.stdout.readline().split()}
    dead = shell.run("-np", "2", script, "dies")
    assert dead.returncode == 128 + signal.SIGKILL, dead.stderr
    shared = {Path(word) for word in dead.stdout.split()}
    assert shared and kept and not shared & kept
    assert not [file for file in shared if file.exists()]
    assert not [file for file in kept if not file.exists()]
    other.send_signal(signal.SIGINT)
    other.communicate(timeout=TIMEOUT_S)
    assert not [file for file in kept if file.exists()]
