"""Watch over one rank: relay its output, forward signals, report how it ended, leave no orphan.

``mpiexec`` starts this file by its path, once per rank, with ``python -I -S``: only the standard
library is here, and it starts in about 15 ms. The rank is a child in a process group of its own;
it inherits every descriptor (MPICH's PMI socket among them). What it writes travels on this
process's stderr as *frames*, one line of printable text each, which survive whatever ``mpiexec``
does to lines and buffers. ``qsgd_hpc.launch.frames`` reads them.

A frame is written only when the pipe is empty and is never longer than the smallest buffer on the
way, so that no reader can cut it in two and put another rank's bytes in between.

Usage: supervise.py TOKEN FRAME_BYTES MEETING COMMAND...
A TOKEN of ``-`` means that no one reads frames: the command then replaces this process. MEETING is
a ``meeting.Meeting.word``, from which torchrun's variables are set for the rank, or ``-``.
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
    "catches",
    "encode",
    "launched_rank",
    "main",
    "slurm_tasks_here",
    "torchrun_variables",
]

MARK = b"\x1e"  # ASCII record separator: no program prints it by chance next to the run's token
COLON = "\x1e:"  # stands for an argument ":", at which mpiexec would begin another program
START, OUT, ERR, END = b"s", b"o", b"e", b"x"
NETWORK = b"n"  # told by the keeper of a cluster's hosts, not by a rank

_RANK_VARIABLES = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMI_RANK", "SLURM_PROCID")
_LOCAL_VARIABLES = (
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    # Last: ranks of other launchers inherit these from a batch script.
    ("SLURM_LOCALID", "", "SLURM_NODEID"),
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGURG)
_PARENT_DIED = signal.SIGRTMIN + 5
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_AFTER_S = 4.0  # between SIGTERM and SIGKILL; below what mpiexec and schedulers allow
_LEFTOVER_S = 2.0  # for processes that a rank left behind


def encode(token: bytes, kind: bytes, rank: int, payload: bytes) -> bytes:
    """Return one frame: MARK token kind rank:base64 newline."""
    body = binascii.b2a_base64(payload, newline=False)
    return b"".join((MARK, token, kind, b"%d:" % rank, body, b"\n"))


def catches(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal (unknown counts as no)."""
    try:
        with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 (pathlib is slow to import)
            mask = next(line for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(mask.split()[1], 16) >> (signum - 1) & 1)


def _signal_group(group: int, signum: int) -> bool:
    """Signal a process group; False when it has no members left."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _run_child(command: list[str], out: int, err: int, speak: int) -> None:
    """Become the rank. Never returns."""
    try:
        os.setpgid(0, 0)
        os.write(speak, b"%d" % os.getpid())  # before there is anything that must not outlive us
        # What mpiexec gives as stdin differs by rank and launcher, and may never end.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # Python ignores the first two, the launcher the third; a rank should not.
        for name in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1):
            signal.signal(name, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"qsgd-hpc run: cannot start {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _clear_shared_memory(since_s: float) -> None:
    """Remove files that the ranks' MPI has left on this node, if none of the ranks is left."""
    import runpy  # not at the start, which is to be quick

    beside = os.path.join(os.path.dirname(__file__), "shared_memory.py")  # noqa: PTH118, PTH120
    runpy.run_path(beside)["sweep"](since_s)


def _outlive(group: int, since_s: float) -> None:
    """Kill what a dead supervisor has left (MPI_Abort kills it, too), and tidy up in its place."""
    gone_by_s = time.monotonic() + _LEFTOVER_S
    while _signal_group(group, signal.SIGKILL) and time.monotonic() < gone_by_s:
        time.sleep(0.01)
    _clear_shared_memory(since_s)


def _start_watcher(since_s: float) -> int:
    """Fork a process that stands in if this one dies; return the descriptor it listens to.

    The rank writes its process group there. When this returns, the watcher is in a session of its
    own, where what kills this process does not reach it.
    """
    listen, speak = os.pipe()
    ready, ready_in = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            os.setsid()
            os.write(ready_in, b".")
            os.dup2(listen, 0)
            os.closerange(1, 4096)
            group = b""
            while said := os.read(0, 16):
                group += said
            if group:
                _outlive(int(group), since_s)
        os._exit(0)
    os.close(listen)
    os.close(ready_in)
    os.read(ready, 1)
    os.close(ready)
    return speak


class Supervisor:
    """The state of one watched rank."""

    def __init__(self, token: bytes, frame_bytes: int, rank: int) -> None:
        self.began_s = time.time()
        self.token, self.rank = token, rank
        self.parent = os.getppid()
        # base64 makes 4 bytes of 3; 40 leaves room for mark, token, kind, rank and newline.
        self.payload_bytes = (frame_bytes - 40) // 4 * 3
        self.is_pipe = stat.S_ISFIFO(os.fstat(2).st_mode)
        self.pid = 0
        self.status: int | None = None
        self.kill_at_s: float | None = None
        self.deaf = False  # the reader of frames has gone
        self.wake, self.wake_in = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_in, False)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        for name in (*_ENDING, *_PASSED, signal.SIGCHLD, _PARENT_DIED):
            signal.signal(name, lambda *_: None)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, int(_PARENT_DIED))
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that we can reap what the rank leaves behind

    def start(self, command: list[str]) -> list[int]:
        """Start the rank and its watcher; return the read ends of its stdout and stderr."""
        out, out_in = os.pipe()
        err, err_in = os.pipe()
        speak = _start_watcher(self.began_s)  # first, so that no rank is ever without
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(command, out_in, err_in, speak)
        with contextlib.suppress(OSError):  # the child does it, too; the order does not matter
            os.setpgid(self.pid, self.pid)
        own = {0, 1, 2, out, err, self.wake, self.wake_in, speak}
        # mpiexec must see the rank's PMI socket close when the rank dies, so keep no copy of it.
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) not in own:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        return [out, err]

    def send(self, kind: bytes, payload: bytes) -> None:
        """Write one frame, once the frame before it has been taken."""
        frame = encode(self.token, kind, self.rank, payload)
        pause_s = 0.00002
        while self.is_pipe and not self.deaf and self._waiting_bytes():
            self.handle_signals()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.001)
        while frame and not self.deaf:
            try:
                frame = frame[os.write(2, frame) :]
            except BlockingIOError:
                select.select([], [2], [], 0.1)
            except OSError:
                self.deaf = True
                self.end_child(signal.SIGTERM)

    def _waiting_bytes(self) -> int:
        count = fcntl.ioctl(2, termios.FIONREAD, b"\0" * 4)
        return int(struct.unpack("i", count)[0])

    def end_child(self, signum: int) -> None:
        """Signal the whole group, and kill it when that does not help."""
        _signal_group(self.pid, signum)
        if self.kill_at_s is None:
            self.kill_at_s = time.monotonic() + _KILL_AFTER_S

    def handle_signals(self) -> None:
        """Act on every signal that arrived since the last call, and on deadlines."""
        try:
            arrived = os.read(self.wake, 64)
        except BlockingIOError:
            arrived = b""
        for signum in arrived:
            if signum in _ENDING:
                self.end_child(signum)
            elif signum == _PARENT_DIED and os.getppid() != self.parent:
                self.deaf = True
                self.end_child(signal.SIGTERM)
            # MPICH's mpiexec tells survivors of a death by SIGUSR1, whose default would kill them.
            elif signum in _PASSED and self.status is None and catches(self.pid, signum):
                os.kill(self.pid, signum)
        self._reap()
        if self.kill_at_s is not None and time.monotonic() >= self.kill_at_s:
            _signal_group(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    _signal_group(self.pid, signal.SIGTERM)
                    self.kill_at_s = time.monotonic() + _LEFTOVER_S

    def relay(self, pipes: list[int]) -> None:
        """Relay output until the rank has ended, its pipes are closed and its group is empty."""
        kinds = dict(zip(pipes, (OUT, ERR), strict=True))
        told = False
        while True:
            # Dead group members vanish without a signal to us, so look again soon.
            ready, _, _ = select.select([*kinds, self.wake], [], [], 0.05 if self.kill_at_s else 5)
            self.handle_signals()
            if self.status and not told:
                # Said at once, and again at the end: a process that the rank left behind may hold
                # its pipes open while other ranks fail because of it, and the first must be first.
                told = True
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
            if (not kinds and not _signal_group(self.pid, 0)) or (overdue and not ready):
                return


def launched_rank() -> int:
    """Return this process's rank as the launcher numbered it; 0 when none did."""
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def torchrun_variables(word: str, environ: dict[str, str]) -> dict[str, str]:
    """Return what torchrun would set in this rank, but for where ranks meet.

    Args:
        word: ``RUN_ID,PORT,2+2``: the ranks of each node, in the order of ranks; without them the
            launcher's own variables tell.
        environ: of the rank.
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
    """Return local rank, local size and node, as the launcher tells them."""
    for name, size_name, node_name in _LOCAL_VARIABLES:
        local, size, node = (environ.get(each, "") for each in (name, size_name, node_name))
        if local.isdigit():
            ranks = int(size) if size.isdigit() else slurm_tasks_here(environ) or world
            return int(local), ranks, int(node) if node.isdigit() else rank // ranks
    return rank, world, 0


def slurm_tasks_here(environ: dict[str, str]) -> int | None:
    """Return how many tasks a Slurm step has on this node: the third of ``2(x2),1`` is 1."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if count.isdigit():
            counts += [int(count)] * (int(times) if times.isdigit() else 1)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _hold(port: int) -> socket.socket | None:
    """Keep a port of this host from others; None, and a word to the user, when one has it."""
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
    """Run one rank. Always 0: a code of our own would set off mpiexec's clean-up and its banner."""
    token, frame_bytes, meeting = argv[0], int(argv[1]), argv[2]
    command = [":" if argument == COLON else argument for argument in argv[3:]]
    if meeting != "-":
        os.environ.update(torchrun_variables(meeting, dict(os.environ)))
    if token == "-":
        os.execvp(command[0], command)
    supervisor = Supervisor(token.encode(), frame_bytes, launched_rank())
    pipes = supervisor.start(command)
    port = int(meeting.split(",")[1]) if meeting != "-" and supervisor.rank == 0 else 0
    holder = _hold(port) if port and os.environ["MASTER_PORT"] == str(port) else None
    supervisor.send(START, f"{supervisor.pid} {socket.gethostname()}".encode())
    supervisor.relay(pipes)
    if holder is not None:
        holder.close()
    _clear_shared_memory(supervisor.began_s)
    supervisor.send(END, b"%d" % (supervisor.status or 0))
    return 0


if __name__ == "__main__":
    # Not sys.exit: it restores the default of SIGUSR1, by which mpiexec speaks of other ranks.
    os._exit(main(sys.argv[1:]))
