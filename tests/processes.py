"""Every process that a test starts belongs to it: it ends with the test, and its output is kept.

A test's processes inherit a mark in their environment, detached jobs and their ranks too; children
without an environment of their own are found in the process table. What outlives its test is named,
killed, and fails it. What a child wrote to a pipe that nobody read is shown when its test fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "MARK",
    "OwnedPopen",
    "Owner",
    "default_interrupts",
    "end_marked",
    "marked",
    "until",
    "without_settings",
]

MARK = "TEST_OWNER"  # not QSGD_*: tests take those out of the environment
# A job's last processes write its end into its folder after whoever waits for it has seen it.
VANISH_S = float(os.environ.get("TESTS_VANISH_S", "60"))
REAP_S = 5.0  # until a killed child can be waited for
SHOWN_CHARS = 20_000  # of one output, from its end
# Started once for a whole process by the standard library, and ended with it.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the living processes whose mark is, or begins with, this one."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            if any(variable.startswith(wanted) for variable in _variables(int(entry.name))):
                process = psutil.Process(int(entry.name))
                if counts(process):
                    yield process


def _variables(pid: int) -> list[bytes]:
    """Return the environment that a process was started with; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def counts(process: psutil.Process) -> bool:
    """Tell whether a process is alive and not a helper of the standard library's own."""
    command = " ".join(process.cmdline())
    return process.status() != psutil.STATUS_ZOMBIE and not any(h in command for h in _HELPERS)


def _children() -> list[psutil.Process]:
    """Return this process's children; that there are none is known without a search, at once."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return psutil.Process().children()


def describe(process: psutil.Process) -> str:
    """Return a line that names a process."""
    try:
        command = " ".join(process.cmdline()) or process.name()
        age_s = time.time() - process.create_time()
        kin = f"child of {process.ppid()}, in group {os.getpgid(process.pid)}"
        return f"pid {process.pid}, {age_s:.0f} s old, {process.status()}, {kin}: {command:.300}"
    except (psutil.Error, OSError):
        return f"pid {process.pid}"


def kill(processes: Iterable[psutil.Process]) -> None:
    """End processes at once; one that has ended meanwhile is no error."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_marked(mark: str) -> list[str]:
    """Kill all processes that are marked so, and what they start meanwhile; return their names."""
    ended: dict[int, str] = {}
    while found := list(marked(mark)):
        ended |= {process.pid: describe(process) for process in found if process.pid not in ended}
        kill(found)
        time.sleep(0.05)
    return list(ended.values())


class Owner:
    """What one test has started.

    Args:
        mark: names the test among all that run on this machine.
        longer: the mark of what fixtures start for several tests.
    """

    current: Owner | None = None

    def __init__(self, mark: str, longer: str) -> None:
        self.mark = mark
        self.longer = f"{MARK}={longer}".encode()
        self.started: list[OwnedPopen] = []
        self._before = {child.pid for child in _children()}

    def survivors(self, patience_s: float) -> list[psutil.Process]:
        """Return what of the test is still alive after a moment to vanish."""
        deadline_s = time.monotonic() + patience_s
        while True:
            found = {process.pid: process for process in marked(self.mark)}
            found |= {process.pid: process for process in self._new_children()}
            if not found or time.monotonic() > deadline_s:
                return list(found.values())
            time.sleep(0.02)

    def _new_children(self) -> Iterator[psutil.Process]:
        """Yield the children of this test, with theirs.

        A child of somebody else's child is none, though it may hide its environment: some write
        what they are over it.
        """
        for child in _children():
            if child.pid in self._before or self.longer in _variables(child.pid):
                continue
            with contextlib.suppress(psutil.Error):
                for process in (child, *child.children(recursive=True)):
                    if counts(process):
                        yield process

    def end(self, patience_s: float) -> list[str]:
        """End all that is left of the test; return what had outlived it by more than a moment."""
        left = self.survivors(patience_s)
        names = [describe(process) for process in left]
        if left:
            kill(left)
            end_marked(self.mark)
        for process in self.started:
            process.drain()
        return names

    def outputs(self) -> list[tuple[str, str]]:
        """Return title and text of what each child has printed into our pipes."""
        found = []
        for process in self.started:
            process.peek()
            for name, text in process.kept.items():
                if text:
                    shown = text[-SHOWN_CHARS:].decode(errors="replace")
                    found.append((f"{name} of {process.title}", shown))
        return found


class OwnedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A child that its test owns: what is left in its pipes is kept for the report, never lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kept: dict[str, bytes] = {}
        super().__init__(*args, **kwargs)
        if Owner.current is not None:
            Owner.current.started.append(self)

    @property
    def title(self) -> str:
        """The command as one line, for people."""
        words = [self.args] if isinstance(self.args, str | os.PathLike) else list(self.args)
        return f"{' '.join(map(str, words)):.300}"

    def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
        """Communicate; keep what had come when waiting is broken off."""
        try:
            out, err = super().communicate(input, timeout)
        except BaseException:
            # Chunks by pipe: the only place where they are when no result is returned.
            partial = getattr(self, "_fileobj2output", None) or {}
            for name in ("stdout", "stderr"):
                chunks = partial.get(getattr(self, name), ())
                self.kept[name] = b"".join(chunks)
            raise
        for name, text in (("stdout", out), ("stderr", err)):
            self.kept[name] = text.encode() if isinstance(text, str) else text or b""
        return out, err

    def peek(self) -> None:
        """Keep what is in the pipes by now and nobody has read."""
        for name in ("stdout", "stderr"):
            pipe = getattr(self, name, None)
            if pipe is None or pipe.closed:
                continue
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError, ValueError):
                text = getattr(pipe, "buffer", pipe).read() or b""
                self.kept[name] = self.kept.get(name, b"") + text
            os.set_blocking(pipe.fileno(), True)

    def drain(self) -> None:
        """Keep what is left in the pipes of a child that has ended; close and reap all of it."""
        self.peek()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(REAP_S)


def until(
    condition: Callable[[], object],
    timeout_s: float = 120.0,
    *,
    process: subprocess.Popen[Any] | None = None,
    every_s: float = 0.05,
) -> None:
    """Wait for a condition; fail in time, and when the process that is to bring it about has ended.

    Args:
        condition: asked again and again.
        timeout_s: far longer than it takes on a busy machine.
        process: whose end says that the condition will never hold.
        every_s: how often it is asked.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        ended = process is not None and process.poll() is not None
        assert not ended or condition(), f"ended too early: {process!r}"
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(every_s)


def without_settings() -> dict[str, str]:
    """Return the environment without what a user may have set for training; the test's home stays.

    Ranks are to find the defaults, whatever the shell that has started the tests has exported. But
    no job is to measure its machine, which takes seconds, unless a test is about that.
    """
    stripped = ("QSGD_", "OMP_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "QSGD_HOME" or not name.startswith(stripped)
    }
    return {**kept, "QSGD_PLANNER": "off"}


def default_interrupts() -> None:
    """Undo what a shell without job control does to what it starts in the background."""
    for name in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(name) == signal.SIG_IGN:
            handler = signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL
            signal.signal(name, handler)
