"""Supervise one rank: relay its output, forward signals, report how it ended, leave no orphan.

``mpiexec`` starts this file by its path, once per rank, with ``python -I -S``, so it uses the
standard library only, and starts in about 15 ms. The rank is a child in its own process group and
inherits every descriptor (including MPICH's PMI socket). Its output is sent on this process's
stderr as *frames*, one line of printable text each, which ``mpiexec`` does not change, however it
handles lines and buffers. ``qsgd_hpc.launch.output`` reads them.

A frame is written only when the pipe is empty and is never longer than the smallest buffer on the
path, so that no reader can split it and insert another rank's bytes.

Usage: supervise.py TOKEN FRAME_BYTES RENDEZVOUS COMMAND...
With a TOKEN of ``-`` there are no frames: the command then replaces this process. RENDEZVOUS is a
``rendezvous.Rendezvous.word``, from which torchrun's variables are set for the rank, or ``-``.
"""

from __future__ import annotations

import binascii
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time

__all__ = [
    "COLON",
    "END",
    "ERR",
    "MARK",
    "NETWORK",
    "OUT",
    "START",
    "STOP",
    "catches",
    "encode",
    "launched_rank",
    "main",
    "slurm_tasks",
    "slurm_tasks_here",
    "sweep_shared_memory",
    "torchrun_variables",
]

MARK = b"\x1e"  # ASCII record separator: no program prints it by chance before the run's token
COLON = "\x1e:"  # replaces an argument ":", at which mpiexec would begin another program
START, OUT, ERR, END = b"s", b"o", b"e", b"x"
NETWORK = b"n"  # sent by the keeper of emulated hosts, not by a rank

# Innermost launchers first: srun, with a PMIx plugin, also sets PMIX_RANK for the proxies of
# MPICH's mpiexec, whose ranks inherit it.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_VARIABLES = (
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    # Last: ranks of other launchers inherit these from a batch script.
    ("SLURM_LOCALID", "", "SLURM_NODEID"),
)
# The SIGTERM for the ranks of Open MPI: its mpiexec forwards this signal to all hosts, but after a
# SIGTERM it kills the supervisors within a second, before the ranks can write a checkpoint.
STOP = signal.SIGALRM
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, STOP)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGURG)
_PARENT_DIED = signal.SIGRTMIN + 5
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_AFTER_S = 4.0  # between SIGTERM and SIGKILL; below what mpiexec and schedulers allow
_STOP_S = 28.0  # the same, if the rank has a handler: it may write a checkpoint; Slurm allows 30 s
_LEFTOVER_S = 2.0  # for processes that a rank left behind

_SHARED_MEMORY = "/dev/shm"
# MPICH 4 and later, MPICH 3; Open MPI 5, Open MPI 4.
_MPI_FILES = ("mpich_shm_", "mpich_shar_tmp", "sm_segment.", "vader_segment.")
# Time stamps of files lag behind the clock by up to a tick of the kernel.
_TICK_S = 0.05


def encode(token: bytes, kind: bytes, rank: int, payload: bytes) -> bytes:
    """Return one frame: MARK token kind rank:base64 newline."""
    body = binascii.b2a_base64(payload, newline=False)
    return b"".join((MARK, token, kind, b"%d:" % rank, body, b"\n"))


def catches(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal; False if unknown."""
    try:
        with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 (pathlib is slow to import)
            mask = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(mask.split()[1], 16) >> (signum - 1) & 1)


def _signal_group(group: int, signum: int) -> bool:
    """Signal a process group; return False if it has no members left."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _run_child(command: list[str], out: int, err: int, watcher: int) -> None:
    """Execute the rank in place of this forked process. Never returns."""
    try:
        os.setpgid(0, 0)
        os.write(watcher, b"%d" % os.getpid())  # before the rank can start processes
        # mpiexec's stdin differs by rank and launcher, and may never end.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # Python ignores the first two, the launcher the third; a rank must not inherit that.
        for name in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1):
            signal.signal(name, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"qsgd-hpc run: cannot start {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127 if error.errno == errno.ENOENT else 126)


def sweep_shared_memory(since_s: float, folder: str = _SHARED_MEMORY) -> list[str]:
    """Remove shared-memory files that MPI does not remove when its ranks are killed.

    MPICH and Open MPI have such files while a job runs and remove them in ``MPI_Finalize``, which a
    killed rank does not call; the memory would then be lost until the machine restarts. A file is
    removed if its name is an MPI's, it belongs to this user, it is not older than the run, and no
    living process has it mapped or open. MPI maps its files as long as a rank of the job lives, so
    files of other jobs are never removed.

    Args:
        since_s: beginning of the run, in seconds since 1970; older files are not its own.
        folder: the folder of shared memory.

    Returns:
        The names of the removed files.
    """
    left = set(_left_files(since_s, folder))
    for pid in _own_processes() if left else ():
        left -= _used_by(pid, left)
        if not left:
            break
    removed = []
    for path in sorted(left):
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 (pathlib is slow to import)
            removed.append(os.path.basename(path))  # noqa: PTH119
    return removed


def _left_files(since_s: float, folder: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                is_own = facts.st_uid == os.getuid() and facts.st_mtime >= since_s - _TICK_S
                if entry.name.startswith(_MPI_FILES) and is_own:
                    found.append(entry.path)
    return found


def _own_processes() -> list[int]:
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                    found.append(int(entry.name))
    return found


def _used_by(pid: int, paths: set[str]) -> set[str]:
    """Return which of the files a process has mapped or open.

    Ended processes use none. Processes that their owner may not inspect are not ranks, because MPI
    itself inspects the memory of ranks.
    """
    used = set()
    try:
        # Check descriptors before maps: a starting rank opens, maps and closes its file, and would
        # be missed in the opposite order.
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError):
                used |= paths & {os.readlink(f"/proc/{pid}/fd/{name}")}  # noqa: PTH115
        with open(f"/proc/{pid}/maps") as lines:  # noqa: PTH123
            for line in lines:
                # Address, rights, offset, device and inode have no slash; the path begins with one.
                used |= paths & {"/" + line.rstrip("\n").partition("/")[2]}
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return used


def _clean_up(group: int, since_s: float) -> None:
    """Kill the rank of a dead supervisor (MPI_Abort kills that, too), and remove its files."""
    gone_by_s = time.monotonic() + _LEFTOVER_S
    while _signal_group(group, signal.SIGKILL) and time.monotonic() < gone_by_s:
        time.sleep(0.01)
    sweep_shared_memory(since_s)


def runs_a_job(pid: int) -> bool:
    """Return whether a process runs a job of this machine, which a rank or script has submitted."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:  # noqa: PTH123 (pathlib is slow to import)
            return b"\0qsgd_hpc.jobs.local_runner\0" in words.read()
    except OSError:
        return False


def _children() -> set[int]:
    """Return the numbers of this process's children; empty if the kernel does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:  # noqa: PTH123
            return set(map(int, children.read().split()))
    except OSError:
        return set()


def _start_watcher(since_s: float) -> tuple[int, int]:
    """Fork a process that cleans up if this one dies; return its number and its pipe's write end.

    The rank writes its process group there. When this returns, the watcher is in its own session,
    so that signals to this process's group do not reach it.
    """
    group_out, group_in = os.pipe()
    ready, ready_in = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        with contextlib.suppress(OSError):
            os.setsid()
            os.write(ready_in, b".")
            os.dup2(group_out, 0)
            os.closerange(1, 4096)
            group = b""
            while data := os.read(0, 16):  # until the supervisor has ended
                group += data
            if group:
                _clean_up(int(group), since_s)
        os._exit(0)
    os.close(group_out)
    os.close(ready_in)
    os.read(ready, 1)
    os.close(ready)
    return watcher, group_in


class Supervisor:
    """The state of one supervised rank."""

    def __init__(self, token: bytes, frame_bytes: int, rank: int) -> None:
        self.began_s = time.time()
        self.token, self.rank = token, rank
        self.parent = os.getppid()
        # base64 makes 4 bytes of 3; 40 leaves room for mark, token, kind, rank and newline.
        self.payload_bytes = (frame_bytes - 40) // 4 * 3
        self.is_pipe = stat.S_ISFIFO(os.fstat(2).st_mode)
        self.pid = self.watcher = 0
        self.status: int | None = None
        self.kill_at_s: float | None = None
        self.reader_gone = False
        self.wake, self.wake_in = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_in, False)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        for name in (*_ENDING, *_PASSED, signal.SIGCHLD, _PARENT_DIED):
            signal.signal(name, lambda *_: None)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, int(_PARENT_DIED))
        # Daemons of the rank become children of this process when the rank has ended.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def start(self, command: list[str]) -> list[int]:
        """Start the rank and its watcher; return the read ends of its stdout and stderr."""
        out, out_in = os.pipe()
        err, err_in = os.pipe()
        self.watcher, watcher = _start_watcher(self.began_s)  # first: a rank always has one
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(command, out_in, err_in, watcher)
        with contextlib.suppress(OSError):  # the child does it, too; the order does not matter
            os.setpgid(self.pid, self.pid)
        own = {0, 1, 2, out, err, self.wake, self.wake_in, watcher}
        # mpiexec must see the rank's PMI socket close when the rank dies, so keep no copy of it.
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) not in own:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        return [out, err]

    def send(self, kind: bytes, payload: bytes) -> None:
        """Write one frame, after the previous one has been read."""
        frame = encode(self.token, kind, self.rank, payload)
        pause_s = 0.00002
        while self.is_pipe and not self.reader_gone and self._unread_bytes():
            self.handle_signals()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.001)
        while frame and not self.reader_gone:
            try:
                frame = frame[os.write(2, frame) :]
            except BlockingIOError:
                select.select([], [2], [], 0.1)
            except OSError:
                self.reader_gone = True
                self.end_child(signal.SIGTERM)

    def _unread_bytes(self) -> int:
        count = fcntl.ioctl(2, termios.FIONREAD, b"\0" * 4)
        return int(struct.unpack("i", count)[0])

    def end_child(self, signum: int) -> None:
        """Signal the rank's process group, and kill it if it has not ended after _KILL_AFTER_S."""
        _signal_group(self.pid, signum)
        if self.kill_at_s is None:
            stops = signum == signal.SIGTERM and catches(self.pid, signum)
            self.kill_at_s = time.monotonic() + (_STOP_S if stops else _KILL_AFTER_S)

    def handle_signals(self) -> None:
        """Handle signals that arrived since the last call, and deadlines."""
        try:
            arrived = os.read(self.wake, 64)
        except BlockingIOError:
            arrived = b""
        for signum in arrived:
            if signum in _ENDING:
                self.end_child(signal.SIGTERM if signum == STOP else signum)
            elif signum == _PARENT_DIED and os.getppid() != self.parent:
                self.reader_gone = True
                self.end_child(signal.SIGTERM)
            # MPICH's mpiexec reports a death to survivors by SIGUSR1, which by default kills them.
            elif signum in _PASSED and self.status is None and catches(self.pid, signum):
                os.kill(self.pid, signum)
        self._reap()
        if self.kill_at_s is not None and time.monotonic() >= self.kill_at_s:
            self._signal_rank(signal.SIGKILL)

    def _signal_rank(self, signum: int) -> bool:
        """Signal all processes of the rank; return False if none is left.

        Processes in sessions of their own are daemons. They are signalled once the rank has ended:
        one that was forked holds the rank's PMI socket, which keeps mpiexec waiting.
        """
        left = _signal_group(self.pid, signum)
        daemons = _children() - {self.pid, self.watcher} if self.status is not None else set()
        daemons = {pid for pid in daemons if not runs_a_job(pid)}
        for pid in daemons:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    os.kill(pid, signum)
                    left = True
        return left

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    self._signal_rank(signal.SIGTERM)
                    self.kill_at_s = time.monotonic() + _LEFTOVER_S

    def relay(self, pipes: list[int]) -> None:
        """Relay output until all processes of the rank have ended and its pipes are closed."""
        kinds = dict(zip(pipes, (OUT, ERR), strict=True))
        reported = False
        while True:
            # The end of other group members causes no signal, so poll while ending.
            ready, _, _ = select.select([*kinds, self.wake], [], [], 0.05 if self.kill_at_s else 5)
            self.handle_signals()
            if self.status and not reported:
                # Reported now, and again at the end: a process that the rank left behind may hold
                # its pipes open while other ranks fail because of it, and the launcher must see
                # the first failure first.
                reported = True
                self.send(END, b"%d" % self.status)
            for pipe in [fd for fd in ready if fd != self.wake]:
                data = os.read(pipe, self.payload_bytes)
                if data:
                    self.send(kinds[pipe], data)
                else:
                    del kinds[pipe]
            if self.status is None or self.kill_at_s is None:
                continue
            overdue = time.monotonic() > self.kill_at_s + 0.2
            if (not kinds and not self._signal_rank(0)) or (overdue and not ready):
                return


def launched_rank() -> int:
    """Return this process's rank from the launcher's variables; 0 if there is none."""
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def torchrun_variables(word: str, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set in this rank, except the rendezvous address.

    Args:
        word: ``RUN_ID,PORT,2+2``: the number of ranks on each node, in the order of ranks; if
            empty, the launcher's variables are used.
        environ: the rank's environment.
    """
    run_id, _, counts = word.split(",")
    rank, world = launched_rank(), int(environ["QSGD_RANKS"])
    starts, node = [0], 0
    for count in map(int, filter(None, counts.split("+"))):
        starts.append(starts[-1] + count)
    if starts[-1] > rank:
        node = sum(start <= rank for start in starts) - 1
        local, size, nodes = rank - starts[node], starts[node + 1] - starts[node], len(starts) - 1
    else:
        local, size, node = _local(environ, rank, world)
        nodes = -(-world // size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _local(environ: dict[str, str], rank: int, world: int) -> tuple[int, int, int]:
    """Return local rank, local size and node from the launcher's variables."""
    for name, size_name, node_name in _LOCAL_VARIABLES:
        local, size, node = (environ.get(each, "") for each in (name, size_name, node_name))
        if local.isdigit():
            ranks = int(size) if size.isdigit() else slurm_tasks_here(environ) or world
            return int(local), ranks, int(node) if node.isdigit() else rank // ranks
    return rank, world, 0


def slurm_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's notation: 2, 2, 1 of ``2(x2),1``."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if count.isdigit():
            counts += [int(count)] * (int(times) if times.isdigit() else 1)
    return counts


def slurm_tasks_here(environ: dict[str, str]) -> int | None:
    """Return a Slurm step's number of tasks on this node: on the third of ``2(x2),1`` it is 1."""
    counts = slurm_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _reserve(port: int) -> socket.socket | None:
    """Reserve a port of this host; if another process uses it, print a message and return None."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("", port))
    except OSError as error:
        text = (
            f"qsgd-hpc run: port {port} of {socket.gethostname()}, where ranks of "
            f"torch.distributed would meet: {error.strerror}. Set MASTER_PORT to another\n"
        )
        os.write(2, text.encode())
        return None
    return holder


def main(argv: list[str]) -> int:
    """Run one rank. Always returns 0: mpiexec would react to another code by ending all ranks."""
    token, frame_bytes, rendezvous = argv[0], int(argv[1]), argv[2]
    command = [":" if argument == COLON else argument for argument in argv[3:]]
    if rendezvous != "-":
        os.environ.update(torchrun_variables(rendezvous, dict(os.environ)))
    if token == "-":
        os.execvp(command[0], command)
    supervisor = Supervisor(token.encode(), frame_bytes, launched_rank())
    pipes = supervisor.start(command)
    port = int(rendezvous.split(",")[1]) if rendezvous != "-" and supervisor.rank == 0 else 0
    holder = _reserve(port) if port and os.environ["MASTER_PORT"] == str(port) else None
    supervisor.send(START, f"{supervisor.pid} {socket.gethostname()}".encode())
    supervisor.relay(pipes)
    if holder is not None:
        holder.close()
    sweep_shared_memory(supervisor.began_s)
    supervisor.send(END, b"%d" % (supervisor.status or 0))
    return 0


if __name__ == "__main__":
    # Not sys.exit: it restores the default of SIGUSR1, by which mpiexec speaks of other ranks.
    os._exit(main(sys.argv[1:]))
