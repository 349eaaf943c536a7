"""The rules of the tests themselves: what a test starts ends with it, what hangs is ended, what
fails once is told from what fails twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests import gate
from tests.processes import MARK, until

ROOT = Path(__file__).parents[1]


def rules(folder: Path) -> tuple[str, ...]:
    """Return the options by which pytest has the rules of this project in a folder elsewhere.

    They are read where those of the project are: from a conftest.py, with output captured.
    """
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    return ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder))


def run_pytest(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests under the rules of this project."""
    (folder / "test_it.py").write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *rules(folder), *options]
    return subprocess.run(
        [*command, str(folder / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


LEAVES_ONE = """
    import subprocess, sys
    def test_leaves_a_process(tmp_path):
        loop = "import os, time\\nprint('still here', flush=True)\\ntime.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", loop], {how})
        print("pid", child.pid)
        {end}
"""


@pytest.mark.parametrize("how", ["", "start_new_session=True"])
def test_a_process_that_outlives_its_test_is_named_ended_and_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TESTS_VANISH_S", "1")
    done = run_pytest(tmp_path, LEAVES_ONE.format(how=how, end=""))
    assert done.returncode == 1
    assert "this test left behind:" in done.stdout
    assert "time.sleep(600)" in done.stdout
    pid = int(done.stdout.split("pid ")[1].split(",")[0])
    assert not psutil.pid_exists(pid)


@pytest.mark.full
def test_a_failing_test_shows_what_its_processes_printed_and_leaves_none(tmp_path: Path) -> None:
    end = "assert child.stdout.readline() == b'nothing'"
    how = "stdout=subprocess.PIPE, stderr=subprocess.STDOUT"
    body = LEAVES_ONE.format(how=how, end=end).replace(
        "time.sleep", "print('more', flush=True); time.sleep"
    )
    done = run_pytest(tmp_path, body)
    assert done.returncode == 1
    assert "stdout of " in done.stdout and "more" in done.stdout
    pid = int(done.stdout.split("pid ")[1].split()[0])
    assert not psutil.pid_exists(pid)


def test_a_hanging_test_is_ended_with_its_stacks_and_what_its_process_printed(
    tmp_path: Path,
) -> None:
    body = """
        import subprocess, sys, threading, time
        def beside(): time.sleep(600)
        def test_hangs():
            threading.Thread(target=beside, daemon=True).start()
            loop = "import time; print('rank 1 at step 7', flush=True); time.sleep(600)"
            subprocess.run([sys.executable, "-c", loop], capture_output=True)
    """
    done = run_pytest(tmp_path, body, "--timeout", "3")
    assert done.returncode == 1
    assert "Timeout" in done.stdout
    assert "in beside" in done.stdout + done.stderr
    assert "rank 1 at step 7" in done.stdout


@pytest.mark.full
@pytest.mark.usefixtures("from_elsewhere")
@pytest.mark.parametrize("workers", [0, 1])
def test_code_that_holds_the_interpreter_is_ended_with_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("TESTS_MARGIN_S", "1")
    body = """
        def test_never_returns():
            sum(range(10**14))  # a loop in C that looks for no signal
    """
    done = run_pytest(tmp_path, body, "--timeout", "1", "-n", str(workers))
    assert done.returncode != 0
    assert "in test_never_returns" in done.stderr
    # Without workers, it is the run itself that is over.
    assert (" failed" in done.stdout) == bool(workers)


@pytest.mark.full
def test_jobs_logs_are_shown_when_their_test_fails(tmp_path: Path) -> None:
    body = """
        def test_job(tmp_path):
            (tmp_path / "jobs").mkdir()
            (tmp_path / "jobs" / "output.log").write_text("rank 3: no space left")
            assert False
    """
    assert "rank 3: no space left" in run_pytest(tmp_path, body).stdout


@pytest.mark.full
def test_a_child_hears_ctrl_c_though_the_tests_were_started_deaf_to_it(tmp_path: Path) -> None:
    body = """
        import signal, subprocess, sys
        def test_child():
            ask = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
            answer = subprocess.check_output([sys.executable, "-c", ask], text=True)
            assert answer == "default_int_handler\\n"
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run_pytest(tmp_path, body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest find the rules when it runs in a folder of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


FLAKY = """
    import os
    from pathlib import Path
    def test_good(): pass
    def test_fails_once():
        flag = Path(__file__).with_name("flag")
        if not flag.exists():
            flag.touch()
            assert False
    def test_fails_always(): assert False
    def test_ends_its_process(): os._exit(3)
    def test_after_it(): pass
"""


def run_gate(folder: Path, body: str, **more: int) -> gate.Result:
    """Run tests as the gate does, without repeating itself: it runs one part."""
    (folder / "test_it.py").write_text(textwrap.dedent(body))
    options = (*rules(folder), str(folder))
    return gate.run({"all": ("-n", "1")}, folder / "records", *options, **more)


@pytest.mark.full
@pytest.mark.usefixtures("from_elsewhere")
def test_what_passes_when_tried_again_is_flaky_and_what_fails_again_is_red(tmp_path: Path) -> None:
    result = run_gate(tmp_path, FLAKY)
    assert result.flaky == ["test_it.py::test_fails_once"]
    failed = {"test_it.py::test_fails_always", "test_it.py::test_ends_its_process"}
    assert set(result.failed) == failed
    assert str(result) == "3 passed, 2 failed, 0 skipped"
    assert not result.well
    assert gate.Result(passed=3, flaky=result.flaky).well


@pytest.mark.full
@pytest.mark.usefixtures("from_elsewhere")
def test_many_failures_end_the_run_and_are_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many = "import pytest\n@pytest.mark.parametrize('i', range(9))\ndef test_bad(i): assert False\n"
    result = run_gate(tmp_path, many, most_failed=3)
    assert (len(result.failed), result.flaky) == (3, [])
    assert "== again ==" not in capfd.readouterr().out


@pytest.mark.full
@pytest.mark.usefixtures("from_elsewhere")
def test_a_run_without_tests_is_red(tmp_path: Path) -> None:
    assert not run_gate(tmp_path, "").well


NEVER_ENDS = """
    import subprocess, threading
    from pathlib import Path
    def test_never_ends():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("pid").write_text(f"{child.pid}\\n")
        threading.Event().wait()
"""


@pytest.fixture
def endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a whole run of a test that never ends; return it, and what the test has started."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(NEVER_ENDS))
    options = (*rules(tmp_path), str(tmp_path))
    body = f"""
        import sys
        from pathlib import Path
        from tests import gate
        parts = {{"all": ("-n", "1")}}
        result, clean = gate.guarded(lambda: gate.run(parts, Path("records"), *{options}))
        sys.exit(10 * result.broken + clean)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **request.param},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), process=run)
    return run, psutil.Process(int(pid.read_text()))


def check_ended(process: psutil.Process) -> None:
    """Check that a process has ended; init may not have reaped it yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        assert process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
@pytest.mark.parametrize("endless", [{"TESTS_SILENCE_S": "1"}], indirect=True, ids=["silent"])
def test_a_run_that_falls_silent_is_ended_with_its_stacks_and_all_it_has_started(
    endless: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    run, child = endless
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 10
    assert "Timeout (0:00:01)!" in said and "xdist/dsession.py" in said
    assert "the run itself broke off" in said
    assert "outlived the tests:" in said and "sleep 600" in said
    check_ended(child)


@pytest.mark.full
@pytest.mark.parametrize("endless", [{}], indirect=True, ids=["ended"])
@pytest.mark.parametrize("how", gate.ENDINGS)
def test_a_run_that_is_ended_from_outside_ends_all_that_it_has_started(
    endless: tuple[subprocess.Popen[str], psutil.Process], how: signal.Signals
) -> None:
    run, child = endless
    run.send_signal(how)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + how
    assert "outlived the tests:" in said and "sleep 600" in said
    check_ended(child)


def test_an_environment_that_cannot_run_the_package_is_told_before_any_test(tmp_path: Path) -> None:
    bare = tmp_path / "environment" / "bin" / "python"
    bare.parent.mkdir(parents=True)
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # it finds no packages
    bare.chmod(0o755)
    gate.require_environments(sys.executable)
    with pytest.raises(SystemExit, match=f"No module named.*Remove {tmp_path / 'environment'}"):
        gate.require_environments(f"{sys.executable}:{bare}")


def test_every_test_bears_the_mark_of_its_own(owner: object) -> None:
    assert os.environ[MARK] == getattr(owner, "mark", None)


@pytest.mark.full
def test_a_mark_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    body = """
        import pytest
        @pytest.mark.gate
        def test_1(): pass
        @pytest.mark.serial
        @pytest.mark.full
        def test_2(): pass
        @pytest.mark.full
        @pytest.mark.gate(mpi=3)
        def test_3(): pass
        @pytest.mark.full
        @pytest.mark.gate(mpi=2)
        def test_4(): pass
    """
    done = run_pytest(tmp_path, body)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert [line.partition("::")[2] for line in done.stderr.splitlines() if "::" in line] == [
        "test_1: 'gate' changes nothing without 'serial' or 'full'",
        "test_2: 'full' changes nothing beside 'serial'",
        "test_3: 'gate' takes nothing but mpi=2",
        "test_4: 'gate(mpi=2)' changes nothing: the test runs under one MPI",
    ]


@pytest.mark.full
def test_what_is_serial_or_full_is_part_of_the_gate_where_it_is_marked_so(tmp_path: Path) -> None:
    body = """
        import pytest
        def test_plain(): pass
        @pytest.mark.full
        def test_full(): pass
        @pytest.mark.serial
        def test_serial(): pass
        @pytest.mark.gate
        @pytest.mark.serial
        def test_chosen(): pass
        MPIS = [1, pytest.param(2, marks=pytest.mark.second_mpi)]
        @pytest.mark.serial
        @pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate(mpi=2))])
        @pytest.mark.parametrize("python", MPIS)
        def test_second(python, ranks): pass
    """
    other = tmp_path / "test_other.py"
    other.write_text("import pytest\npytestmark = pytest.mark.full\nassert False, 'imported'\n")
    done = run_pytest(tmp_path, body, str(tmp_path), "--gate", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == ["test_plain", "test_chosen", "test_second[2-2]"]
