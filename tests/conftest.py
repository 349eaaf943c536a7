"""What holds for all tests: who owns processes, how long one may take, what a failure shows."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from xdist.scheduler import LoadFileScheduling

from qsgd_hpc.launch.supervise import sweep_shared_memory
from tests.processes import (
    MARK,
    VANISH_S,
    OwnedPopen,
    Owner,
    default_interrupts,
    end_marked,
)

FAILED = pytest.StashKey[bool]()
# pytest-timeout ends a test from within the interpreter; compiled code that never returns to it is
# ended from outside, with the process and the stacks of all its threads.
HARD_LIMIT_MARGIN_S = float(os.environ.get("TESTS_MARGIN_S", "30"))
LONGEST_S = 1800.0  # the longest that a test asks for: it builds, or trains for long
SILENCE_MARGIN_S = 180.0  # a test that takes too long is ended by itself, before this
SHOWN_CHARS = 20_000
# pytest points fd 2 at a file of its own while it loads this file and while a test runs; this is
# the stderr from before.
STDERR = pytest.StashKey[TextIO]()


class Watchdog:
    """Names each failure at once, which a run that is broken off would not.

    Ends a run whose workers say nothing any more: they may wait for it, and it for them.
    """

    def __init__(self, config: pytest.Config) -> None:
        longest_s = float(config.getoption("timeout") or LONGEST_S) + SILENCE_MARGIN_S
        self._silence_s = float(os.environ.get("TESTS_SILENCE_S", longest_s))
        self._stderr = config.stash[STDERR]
        self._arm(longest_s)

    def _arm(self, limit_s: float) -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stderr)

    def pytest_runtest_logstart(self) -> None:
        self._arm(self._silence_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._arm(self._silence_s)
        if report.failed:
            last = (report.longreprtext.splitlines() or [""])[-1]
            print(f"\nfailed: {report.nodeid}: {last}", file=self._stderr, flush=True)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate", action="store_true", help="run what every change must pass")


def is_worker(config: pytest.Config) -> bool:
    """Tell whether this process runs tests for another, which pytest-xdist has started."""
    return hasattr(config, "workerinput")


class ByFile(LoadFileScheduling):
    """Gives a file's tests to one worker, and the whole contract, whose files import TensorFlow."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/contract" if file.startswith("tests/contract/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    default_interrupts()
    # Whatever is installed on this machine: a test that means a scheduler brings its own.
    os.environ["QSGD_SITE"] = "local"
    # A job that compresses measures its machine once: seconds, of which tests need none.
    os.environ["QSGD_PLANNER"] = "off"
    os.environ[MARK] = os.environ.get(MARK, f"session-{secrets.token_hex(4)}") + "."
    # What frameworks and MPIs leave in the folder for temporary files goes with this one, whose
    # name is short because names of sockets are.
    beside = Path(tempfile.gettempdir()).parent if is_worker(config) else None
    own = tempfile.TemporaryDirectory(prefix="tests-", dir=beside, ignore_cleanup_errors=True)
    config.add_cleanup(own.cleanup)
    Path(own.name).chmod(0o1777)  # as /tmp: a database runs as a user of its own
    os.environ["TMPDIR"] = own.name
    os.environ["QSGD_HOME"] = str(Path(own.name, "session"))
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")
    config.add_cleanup(config.stash[STDERR].close)
    subprocess.Popen = OwnedPopen  # type: ignore[misc]
    if config.getoption("numprocesses", None) and not is_worker(config):
        config.pluginmanager.register(Watchdog(config))


def in_gate(item: pytest.Item) -> bool:
    """Tell whether every change must pass this test.

    A test that is marked ``serial`` or ``full`` must be marked ``gate``, too, and ``gate(mpi=2)``
    under the second MPI. Every other test is part of the gate.
    """
    marks = {mark.name for mark in item.iter_markers()}
    mpi = 2 if "second_mpi" in marks else 1
    chosen = {mark.kwargs.get("mpi", 1) for mark in item.iter_markers("gate")}
    return mpi in chosen or not marks & {"serial", "full"}


def idle_marks(item: pytest.Item) -> Iterator[str]:
    """Yield what is wrong with marks that change nothing."""
    marks = {mark.name for mark in item.iter_markers()}
    if {"serial", "full"} <= marks:
        yield "'full' changes nothing beside 'serial'"
    if "gate" in marks and not marks & {"serial", "full"}:
        yield "'gate' changes nothing without 'serial' or 'full'"
    for mark in item.iter_markers("gate"):
        if mark.args or mark.kwargs not in ({}, {"mpi": 2}):
            yield "'gate' takes nothing but mpi=2"
        elif mark.kwargs and ("python" not in item.fixturenames or "one_mpi" in marks):
            yield "'gate(mpi=2)' changes nothing: the test runs under one MPI"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of no use to this part of the gate: each worker would import TensorFlow.

    So a file with serial tests says "mark.serial", or the conftest beside it marks all tests.
    """
    if not config.getoption("gate", False) or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    beside = collection_path.with_name("conftest.py")
    has_own = beside.exists() and beside != Path(__file__)
    folder_is_serial = has_own and 'add_marker("serial")' in beside.read_text(encoding="utf-8")
    unused = {
        "serial": not folder_is_serial and "mark.serial" not in text,
        "not serial": folder_is_serial or "pytestmark = pytest.mark.serial" in text,
    }.get(config.getoption("markexpr"), False)
    full = "pytestmark = pytest.mark.full" in text and "mark.gate" not in text
    return unused or full or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if idle := [f"{item.nodeid}: {each}" for item in items for each in idle_marks(item)]:
        raise pytest.UsageError("\n".join(idle))
    if config.getoption("gate", False):
        out = [item for item in items if not in_gate(item)]
        items[:] = [item for item in items if in_gate(item)]
        config.hook.pytest_deselected(items=out)


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    chosen = marker.args[0] if marker else item.config.getoption("timeout")
    return float(chosen or item.config.getini("timeout"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if sys.gettrace() is None:  # under a debugger there is no haste
        limit_s = _limit_s(item) + HARD_LIMIT_MARGIN_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def owner(request: pytest.FixtureRequest) -> Iterator[Owner | None]:
    """Own every process of this test: set up before all else of it, and torn down after.

    The ranks of a suite are themselves such processes, of the test that has started them.
    """
    if request.config.pluginmanager.hasplugin("tests.ranks"):
        yield None
        return
    before, home = os.environ[MARK], os.environ["QSGD_HOME"]
    token = secrets.token_hex(4)
    mine = Owner(f"{before}{token}", longer=before)
    os.environ[MARK], Owner.current = mine.mark, mine
    os.environ["QSGD_HOME"] = str(Path(home).with_name(token))  # made when it is needed
    began_s = time.time()
    yield mine
    failed = request.node.stash.get(FAILED, False)
    left = mine.end(0 if failed else VANISH_S)
    if request.node.get_closest_marker("serial"):  # else another test's ranks may be at work
        left += [f"shared memory /dev/shm/{name}" for name in sweep_shared_memory(began_s)]
    os.environ[MARK], os.environ["QSGD_HOME"], Owner.current = before, home, None
    if left and not failed:
        pytest.fail("this test left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def twin() -> Path:
    """The GPU kernels, compiled for the CPU once for all workers and runs of the same sources."""
    from tests.gpu.twin import compile_twin

    folder = Path(__file__).parents[1] / "build" / "twin"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_twin(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        report.sections += _printed(item)
    return report


def _printed(item: pytest.Item) -> list[tuple[str, str]]:
    """Return what the processes of a test have printed: to us, and into the logs of its jobs."""
    found = Owner.current.outputs() if Owner.current else []
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    for log in sorted(folder.rglob("*.log")) if isinstance(folder, Path) else ():
        with contextlib.suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARS:]
            if text:
                found.append((str(log.relative_to(folder)), text))
    return found


@pytest.hookimpl(trylast=True)  # after the teardown of what a broken-off session had set up
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what fixtures of the whole session have left running, and say so."""
    if is_worker(session.config) or session.config.getoption("numprocesses", None):
        return  # what is marked so are workers; whoever started them looks after them
    for line in end_marked(os.environ[MARK]):
        print(f"outlived the tests: {line}", file=session.config.stash[STDERR], flush=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
