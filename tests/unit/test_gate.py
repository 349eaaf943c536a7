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

from tests import gate, selection
from tests.processes import MARK, OUTCOMES, until

ROOT = Path(__file__).parents[2]


def rules(folder: Path) -> tuple[str, ...]:
    """Return the options by which pytest has the rules of this project in a folder elsewhere.

    They are read where those of the project are: from a conftest.py, with output captured.
    """
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder))
    return (*settings, "-p", "no:cacheprovider")


def run_pytest(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests under the rules of this project."""
    (folder / "test_it.py").write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "pytest", *rules(folder), *options]
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


def test_jobs_logs_are_shown_when_their_test_fails(tmp_path: Path) -> None:
    body = """
        def test_job(tmp_path):
            (tmp_path / "jobs").mkdir()
            (tmp_path / "jobs" / "output.log").write_text("rank 3: no space left")
            assert False
    """
    assert "rank 3: no space left" in run_pytest(tmp_path, body).stdout


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
    from pathlib import Path
    def test_good(): pass
    def test_fails_once():
        flag = Path(__file__).with_name("flag")
        if not flag.exists():
            flag.touch()
            assert False
    def test_fails_always(): assert {holds}
"""


@pytest.mark.usefixtures("from_elsewhere")
@pytest.mark.parametrize("holds", [True, False])
def test_what_passes_when_tried_again_is_flaky_and_what_fails_again_is_red(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], holds: bool
) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(FLAKY.format(holds=holds)))
    options = rules(tmp_path)
    file = str(tmp_path / "test_it.py")
    result = gate.verdict([gate.Phase("all", (*options, file))], tmp_path, options)
    said = capfd.readouterr().out
    assert result.flaky == ["test_it.py::test_fails_once"]
    assert "flaky: test_it.py::test_fails_once" in said
    assert result.well == holds
    assert ("failed twice: test_it.py::test_fails_always" in said) != holds
    assert list(result.failed) == ([] if holds else ["test_it.py::test_fails_always"])
    assert str(result) == f"{2 + holds} passed, {1 - holds} failed, 0 skipped"


@pytest.mark.usefixtures("from_elsewhere")
def test_many_failures_end_the_run_and_are_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many = "import pytest\n@pytest.mark.parametrize('i', range(9))\ndef test_bad(i): assert False\n"
    (tmp_path / "test_it.py").write_text(many)
    phase = gate.Phase("all", (*rules(tmp_path), str(tmp_path / "test_it.py")), most_failed=3)
    result = gate.verdict([phase, phase], tmp_path, rules(tmp_path))
    assert (result.well, len(result.failed), result.flaky) == (False, 3, [])
    said = capfd.readouterr().out
    assert said.count("== all ==") == 1 and "once more" not in said


@pytest.mark.usefixtures("from_elsewhere")
def test_a_run_that_is_broken_off_is_red_and_names_the_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_gone(): os._exit(3)\n")
    options = rules(tmp_path)
    phase = gate.Phase("all", (*options, str(tmp_path / "test_it.py")))
    result = gate.verdict([phase], tmp_path, options)
    assert not result.well
    assert list(result.failed) == ["test_it.py::test_gone"]
    assert (
        "broken off, with pytest's exit code 3, in: test_it.py::test_gone" in capfd.readouterr().out
    )


def test_a_run_that_falls_silent_is_ended_with_its_stacks_and_all_it_has_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        import subprocess, sys, threading
        from pathlib import Path
        def test_never_ends():
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            Path(__file__).with_name("pid").write_text(f"{child.pid}\\n")
            threading.Event().wait()
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(body))
    file = tmp_path / "outcomes.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-n", "1", *rules(tmp_path), "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), OUTCOMES: str(file)},
    )
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), process=run)
    gate.wait(run, file, longest_s=1)
    after = capfd.readouterr()
    assert run.returncode == -signal.SIGABRT
    assert "for 1 s no test has begun or ended: the run was ended" in after.out
    assert "in test_never_ends" in after.err
    assert gate.read(file).broken_off == ("test_it.py::test_never_ends",)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(pid.read_text()))
        assert child.status() == psutil.STATUS_ZOMBIE


ENDED_FROM_OUTSIDE = """
    import subprocess, sys
    from pathlib import Path
    def test_waits():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("pid").write_text(f"{child.pid}\\n")
        child.wait()
"""


@pytest.mark.usefixtures("from_elsewhere")
@pytest.mark.parametrize("how", gate.ENDINGS)
def test_a_run_that_is_ended_from_outside_ends_all_that_it_has_started(
    tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(ENDED_FROM_OUTSIDE))
    phase = gate.Phase("all", (*rules(tmp_path), str(tmp_path / "test_it.py")))
    main = "import sys; from tests import gate; sys.argv = ['gate']"
    body = f"{main}; gate.phases = lambda _: [gate.{phase}]; sys.exit(gate.main())"
    run = subprocess.Popen([sys.executable, "-c", body], cwd=tmp_path, stdout=subprocess.PIPE)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), process=run)
    run.send_signal(how)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + how
    assert b"outlived the tests:" in said and b"sleep 600" in said
    with contextlib.suppress(psutil.NoSuchProcess):  # init may not have reaped it yet
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


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


def test_an_entry_whose_test_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SERIAL", ())
    monkeypatch.setattr(selection, "JOBS", ())
    monkeypatch.setattr(
        selection,
        "GATE",
        ("a.py::test_kept[.venv-openmpi]", "a.py::test_old", "b.py::test_elsewhere"),
    )
    assert selection.unmatched(["a.py::test_kept[.venv]", "a.py::test_new"]) == ["a.py::test_old"]
