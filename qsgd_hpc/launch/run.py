"""A run: check a request, find its MPI, and run it; its output, signals and deadlines."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO

from qsgd_hpc import env
from qsgd_hpc.errors import EXIT_RESUBMIT, UsageError
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.cluster.links import LinkLog
from qsgd_hpc.launch.command import (
    Command,
    Machine,
    build_command,
    placement_fault,
    usable_cores,
)
from qsgd_hpc.launch.mpi import (
    Family,
    Launcher,
    Library,
    find_launcher,
    find_library,
    prepare_mpiexec,
)
from qsgd_hpc.launch.options import (
    RunOptions,
    check_options,
    resolve_command,
    stdin_program_at,
    with_program,
)
from qsgd_hpc.launch.output import (
    Decoder,
    Ended,
    Event,
    Ledger,
    LineSink,
    Links,
    Output,
    RankFiles,
    Raw,
    Started,
    describe_early_end,
    explain,
    list_ranks,
    stopped_at_checkpoint,
)
from qsgd_hpc.launch.rendezvous import Rendezvous, remarks, rendezvous, without_outer_launch
from qsgd_hpc.launch.supervise import STOP, catches

__all__ = ["Plan", "Session", "plan", "run", "say"]

KILL_AFTER_S = 8.0  # between SIGTERM and SIGKILL to mpiexec; supervisors kill after 4 s
STOP_S = 32.0  # the same after a SIGTERM from outside; ranks that handle it have 28 s
DRAIN_S = 3.0  # for output in flight when mpiexec has ended
MPIEXEC = -1  # owner of mpiexec's own lines
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Plan:
    """A checked request with its MPI library and the mpiexec that belongs to it."""

    options: RunOptions
    library: Library
    launcher: Launcher

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the ranks inherit."""
        return without_outer_launch(os.environ)

    def command(self, token: str = "-", place: Rendezvous | None = None) -> Command:
        """Return the command line; with a token other than "-", the output consists of frames."""
        machine = Machine(usable_cores(), os.geteuid() == 0)
        return build_command(
            self.options, self.launcher, machine, self.environ, token=token, rendezvous=place
        )


def plan(options: RunOptions) -> Plan:
    """Check a request, find its MPI, and read the program from stdin, if Python reads it there.

    Raises:
        UsageError: all errors of the request, one per line.
    """
    faults = check_options(options)
    faults += _faulty_variables({**os.environ, **options.env})
    try:
        options = replace(options, command=resolve_command(options.command))
    except UsageError as error:
        faults.append(str(error))
    if faults:
        raise UsageError("\n".join(faults))
    at = stdin_program_at(options.command)
    if at is not None:
        stdin = getattr(sys.stdin, "buffer", None)
        options = replace(options, command=with_program(options.command, at, stdin))
    library = find_library()
    launcher = find_launcher(library)
    if options.network is not None:
        if launcher.family not in (Family.HYDRA, Family.OPEN_MPI):
            raise UsageError(
                "--network starts ranks with the mpiexec of MPICH or Open MPI; here it is "
                f"{launcher.path} ({launcher.family.value}). pip install 'qsgd-hpc[mpich]' "
                "installs one."
            )
        trial(options.network, len(options.nodes))
    elif fault := placement_fault(options, launcher.family):
        raise UsageError(fault)
    return Plan(options, library, launcher)


def _faulty_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the errors of QSGD_* variables, so that they are reported once, not on every rank."""
    faults = []
    for name in env.TABLE:
        try:
            env.get(name, environ)
        except UsageError as error:
            faults.append(str(error))
    return faults


def run(options: RunOptions) -> int:
    """Start the ranks, wait for them, and return the exit code for the shell.

    Every rank's stdin is /dev/null; with ``python -``, each rank gets the program. The exit code is
    the first failing rank's, or 128 + signal if a signal killed it; 130 after Ctrl-C, 143 after
    SIGTERM.

    Raises:
        UsageError: the request is invalid, or there is no MPI.
    """
    checked = plan(options)
    if options.verbose:
        say(f"MPI: {checked.library.name}, {checked.library.path}")
        say(f"mpiexec: {checked.launcher.path} ({checked.launcher.version})")
    token = secrets.token_hex(4)
    for remark in remarks(checked.options, checked.environ):
        say(remark)
    session = Session(
        checked.options,
        checked.launcher,
        token,
        grace_s=env.get("QSGD_RUN_GRACE_S"),
        warning_s=env.get("QSGD_STALL_WARNING_S"),
    )
    with rendezvous(checked.options, os.environ) as place:
        return session.run(checked.command(token, place), checked.environ)


def say(text: str) -> None:
    """Print a message of the launcher to stderr."""
    with contextlib.suppress(OSError):  # its reader has ended, or the disk is full
        sys.stderr.write(f"qsgd-hpc run: {text}\n")
        sys.stderr.flush()


def _ending_signals() -> list[signal.Signals]:
    """Return the signals that end the run; under nohup, SIGHUP is ignored and stays so."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in _ENDING if each is not signal.SIGHUP or not is_ignored]


@contextlib.contextmanager
def _signals_as_bytes(names: Iterable[signal.Signals]) -> Iterator[int]:
    """Write signals as bytes to a pipe, and yield its read end."""
    wake, wake_in = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_in, False)
    before_fd = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    before = {name: signal.signal(name, lambda *_: None) for name in names}
    try:
        yield wake
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(wake)
        os.close(wake_in)


class Session:
    """The state of one run.

    Args:
        options: a checked request.
        launcher: the mpiexec in use.
        token: marks the frames of this run.
        grace_s: seconds that the other ranks have to end after one has failed.
        warning_s: seconds after the first rank's successful end until the ranks that still run are
            named; 0: never.
    """

    def __init__(
        self,
        options: RunOptions,
        launcher: Launcher,
        token: str,
        *,
        grace_s: float,
        warning_s: float,
    ) -> None:
        self.options, self.launcher = options, launcher
        self.grace_s, self.warning_s = grace_s, warning_s
        self.ledger = Ledger(options.ranks)
        self.sinks = {
            is_stderr: LineSink(
                _raw(stream), prefix=options.prefix_output, timestamps=options.timestamps
            )
            for is_stderr, stream in ((False, sys.stdout), (True, sys.stderr))
        }
        self.files = (
            RankFiles(options.output_folder, options.ranks) if options.output_folder else None
        )
        self.links = LinkLog(options.network, len(options.nodes)) if options.network else None
        self.decoders = {"stdout": Decoder(token), "stderr": Decoder(token)}
        self.remarks: list[bytes] = []  # mpiexec's own output once all ranks have started
        self.interrupted_by: int | None = None
        self.unwritable: OSError | None = None  # why output could not be written
        self.term_at_s: float | None = None  # end of the other ranks' grace period
        self.warn_at_s: float | None = None
        self.kill_at_s: float | None = None
        self.start_by_s = time.monotonic() + (options.start_timeout_s or float("inf"))
        self.late: tuple[int, ...] = ()  # ranks that had not started by start_by_s
        self.process: subprocess.Popen[bytes]

    def run(self, command: Command, inherited: Mapping[str, str]) -> int:
        """Run mpiexec to its end; return the exit code for the shell.

        ``inherited``: the variables that mpiexec gets in addition to the command's.
        """
        environ = {**inherited, **command.env}
        with _signals_as_bytes((*_ending_signals(), *_PASSED, signal.SIGCHLD)) as wake:
            # In its own session, so that only this process receives the terminal's Ctrl-C and can
            # end the ranks in order.
            self.process = subprocess.Popen(
                command.argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=prepare_mpiexec,
            )
            with self.process:  # closes its pipes
                self._watch(wake)
        return self._report()

    def _watch(self, wake: int) -> None:
        assert self.process.stdout and self.process.stderr
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self.process.stdout, selectors.EVENT_READ, self.decoders["stdout"])
            selector.register(self.process.stderr, selectors.EVENT_READ, self.decoders["stderr"])
            drained_at_s = None
            while len(selector.get_map()) > 1:
                ready = selector.select(timeout=0.1)
                for key, _ in ready:
                    if key.data is None:
                        self._on_signals(os.read(wake, 64))
                        continue
                    data = os.read(key.fd, 1 << 16)
                    with self._reader_may_leave():
                        self._on_events(key.data.feed(data) if data else key.data.finish())
                    if not data:
                        selector.unregister(key.fileobj)
                self._on_time(time.monotonic())
                if self.process.poll() is not None:
                    drained_at_s = drained_at_s or time.monotonic() + DRAIN_S
                    if time.monotonic() > drained_at_s and not ready:
                        break
        try:
            self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()
        with self._reader_may_leave():
            for sink in self.sinks.values():
                sink.finish()
        if self.files:
            self.files.close()

    @contextlib.contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        """End the ranks if output cannot be written: silently if its reader has ended (``| head``).

        Otherwise, the disk is full.
        """
        try:
            yield
        except BrokenPipeError:
            if self.interrupted_by is None:
                self.interrupted_by = signal.SIGPIPE
                self._end(time.monotonic())
        except OSError as error:
            self.unwritable = self.unwritable or error
            self._end(time.monotonic())

    def _on_signals(self, arrived: bytes) -> None:
        for signum in arrived:
            if signum in _PASSED:
                self._pass(signum)
            elif signum in _ENDING:
                if self.interrupted_by is None:
                    self.interrupted_by = signum
                    if signum == signal.SIGTERM:
                        self._end(time.monotonic(), STOP_S, self._stopping_signal())
                    else:
                        self._end(time.monotonic())
                elif signum == signal.SIGINT:
                    self._kill()  # a second Ctrl-C does not wait

    def _on_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self.sinks[event.is_stderr].write(event.rank, event.data)
                self._copy(event)
                if event.is_stderr:
                    self.ledger.note(event.data)
            elif isinstance(event, Started):
                self.ledger.started[event.rank] = event
            elif isinstance(event, Ended):
                self._on_end(event)
            elif isinstance(event, Links):
                self._on_links(event.facts)
            elif isinstance(event, Raw):
                starting = len(self.ledger.started) < self.options.ranks and self.kill_at_s is None
                if starting or self.options.verbose:
                    self.sinks[True].write(MPIEXEC, event.data)
                else:
                    self.remarks.append(event.data)

    def _copy(self, event: Output) -> None:
        """Write a rank's output to its file; without space there, only report that."""
        if self.files:
            try:
                self.files.write(event.rank, event.is_stderr, event.data)
            except OSError as error:
                self.files.close()
                self.files = None
                say(
                    f"--output-filename {self.options.output_folder}: {error.strerror}; its files "
                    "lack all further output"
                )

    def _on_end(self, event: Ended) -> None:
        for sink in self.sinks.values():
            sink.close(event.rank)
        if event.rank in self.ledger.ended:
            return  # a failure is reported immediately, and again after the output has ended
        now_s = time.monotonic()
        self.ledger.record(event, now_s)
        if self.kill_at_s is not None and not self.ledger.running:
            self.kill_at_s = min(self.kill_at_s, now_s + KILL_AFTER_S)  # no rank saves any more
        if event.status != 0 and self.term_at_s is None:
            self.term_at_s = now_s + self.grace_s
        if len(self.ledger.ends) == 1 and self.warning_s > 0:
            self.warn_at_s = now_s + self.warning_s

    def _on_links(self, facts: Mapping[str, Any]) -> None:
        if self.links:
            for sentence in self.links.report(facts, {**os.environ, **self.options.env}):
                say(sentence)

    def _on_time(self, now_s: float) -> None:
        with self._reader_may_leave():
            for sink in self.sinks.values():
                sink.tick()
        ending = self.kill_at_s is not None
        if self.warn_at_s is not None and now_s >= self.warn_at_s:
            self.warn_at_s = None
            if self.ledger.first_failure is None and self.ledger.running and not ending:
                say(describe_early_end(self.ledger, self.warning_s))
        if now_s >= self.start_by_s and not ending:
            self.start_by_s = float("inf")
            self.late = tuple(sorted(set(range(self.options.ranks)) - set(self.ledger.started)))
            if self.late:
                self._end(now_s)
        if self.term_at_s is not None and now_s >= self.term_at_s and not ending:
            self.ledger.overdue = self.ledger.running
            self._end(now_s)
        if self.kill_at_s is not None and now_s >= self.kill_at_s:
            self._kill()

    def _stopping_signal(self) -> signal.Signals:
        """Return the signal to mpiexec that gives the ranks time for a checkpoint."""
        # Ranks that start later do not get a forwarded signal.
        have_started = len(self.ledger.started) == self.options.ranks
        is_open_mpi = self.launcher.family is Family.OPEN_MPI
        return STOP if is_open_mpi and have_started else signal.SIGTERM

    def _end(
        self,
        now_s: float,
        patience_s: float = KILL_AFTER_S,
        signum: signal.Signals = signal.SIGTERM,
    ) -> None:
        if self.kill_at_s is None:
            self.kill_at_s = now_s + patience_s
            self._signal_mpiexec(signum)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _pass(self, signum: int) -> None:
        if self.launcher.family not in (Family.HYDRA, Family.INTEL):
            self._signal_mpiexec(signum)
            return
        # Hydra does not forward these (SIGUSR2 would end it): signal the ranks on this machine.
        here = {socket.gethostname()}
        if self.options.network:
            here |= {host.name for host in self.options.nodes}
        for rank in self.ledger.running:
            start = self.ledger.started[rank]
            if start.host in here and catches(start.pid, signum):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(start.pid, signum)

    def _signal_mpiexec(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    def _report(self) -> int:
        code = self.process.returncode
        if self.interrupted_by is not None:
            if self.interrupted_by == signal.SIGTERM and stopped_at_checkpoint(self.ledger):
                say(explain(self.ledger, code, self.grace_s) or "")
                return EXIT_RESUBMIT
            if self.interrupted_by != signal.SIGPIPE:
                name = signal.Signals(self.interrupted_by).name
                how = "Ctrl-C" if self.interrupted_by == signal.SIGINT else name
                say(f"{how}: every rank has been ended")
            return 128 + self.interrupted_by
        if self.unwritable is not None:
            say(f"the output cannot be written ({self.unwritable.strerror}); every rank was ended")
            return 1
        if self.late:
            say(
                f"{list_ranks(self.late)} had not started {self.options.start_timeout_s:g} s "
                "after mpiexec (--start-timeout); check that the hosts can be reached by ssh"
            )
            return 1
        message = explain(self.ledger, code, self.grace_s)
        if message is not None:
            if self.ledger.first_failure is None and self.remarks:
                _raw(sys.stderr).write(b"".join(self.remarks))
            say(message)
        return self.ledger.exit_code(code)


class _Text(io.RawIOBase):
    """A binary stream that writes to a text stream without a buffer, such as a notebook's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(bytes(data))


def _raw(stream: Any) -> Any:
    """Return the unbuffered stream below a text stream, whose own text is written first."""
    buffer: Any = getattr(stream, "buffer", None)
    if buffer is None:
        return _Text(stream)
    with contextlib.suppress(OSError):  # its reader has ended, or the disk is full
        stream.flush()
    return getattr(buffer, "raw", buffer)
