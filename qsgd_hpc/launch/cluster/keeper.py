"""Own the hosts of one run: create them, run mpiexec on them, and end with it.

    python -m qsgd_hpc.launch.cluster.keeper '{"network": "1gbit", "hosts": 4, ...}' mpiexec ...

``qsgd-hpc run --network`` starts this instead of mpiexec, and forwards signals to it. The hosts
exist as long as this process and the processes on them. It writes its measurements to stderr: as
frames, like the ranks' supervisors, or as JSON if there is no token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster.links import (
    ClusterError,
    add_hosts,
    drained_bytes,
    reached_bits_s,
    sent_bytes,
)
from qsgd_hpc.launch.cluster.namespaces import (
    VARIABLE,
    Namespaces,
    become_private,
    explain_namespaces,
    hide_file,
    written,
)
from qsgd_hpc.launch.cluster.network import Network, hosts_file
from qsgd_hpc.launch.mpi import end_with_parent, prepare_mpiexec, raise_file_limit
from qsgd_hpc.launch.supervise import NETWORK, STOP, encode

__all__ = ["Task", "command", "main", "trial"]

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2)
TRIAL_LIMIT_S = 60.0
# Without the caller's folder in sys.path: a script's queue.py must not replace Python's own.
_START = "import sys; sys.path[:] = filter(None, sys.path); from {} import main; main()"


@dataclass(frozen=True)
class Task:
    """The task of the keeper.

    Attributes:
        network: in the notation of Network.parse.
        hosts: number of hosts.
        token: marks the frames of the run; "-": no frames.
        trial: only create the hosts, then end.
    """

    network: str
    hosts: int
    token: str = "-"
    trial: bool = False


def command(task: Task, mpiexec: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a keeper that runs mpiexec."""
    return (sys.executable, "-c", _START.format(__name__), json.dumps(asdict(task)), *mpiexec)


def trial(network: Network, hosts: int) -> None:
    """Create the hosts in a separate process, which then ends.

    Raises:
        ClusterError: they cannot be created here; the message has the remedy.
    """
    try:
        done = subprocess.run(
            command(Task(network.text, hosts, trial=True), ()),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"--network: creating {hosts} hosts took more than {TRIAL_LIMIT_S:g} s; use fewer, "
            "or try again when the machine is less busy"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ClusterError(last)


def main() -> None:
    """Execute the task of the command line; exit with mpiexec's code."""
    task, mpiexec = Task(**json.loads(sys.argv[1])), sys.argv[2:]
    parent = os.getppid()
    try:
        cluster = _Cluster(task)
        end_with_parent()  # only now, because new credentials clear it
        if os.getppid() != parent:
            sys.exit(143)
        if task.trial:
            return
        code = cluster.run(mpiexec)
    except UsageError as error:
        sys.exit(str(error))
    if code < 0:  # end by the same signal, so that the launcher sees mpiexec's status
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


class _Cluster:
    """The hosts by name, and the namespaces in which mpiexec runs (``home``)."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.network = Network.parse(task.network)
        raise_file_limit(4 * task.hosts)  # each has four open files
        try:
            become_private()
            _name_hosts(task.hosts)
            self.home = Namespaces.here()
            self.hosts = add_hosts(self.network, task.hosts, self.home)
        except OSError as error:
            raise ClusterError(explain_namespaces(error)) from None

    def run(self, mpiexec: Sequence[str]) -> int:
        """Run mpiexec to its end, measuring the links before and after; return its code."""
        names = list(self.hosts)
        self._report(when="before", reached_bits_s=self._reached())
        before = drained_bytes(names)
        # If this process is killed, the networks must remain for the last messages of the ranks'
        # daemons to mpiexec, which waits a minute for a connection whose network is gone.
        kept = [host.descriptors["net"] for host in self.hosts.values()]
        code, was_ended = _run_passing_signals(mpiexec, self._environment(), kept)
        sent = [after - b for after, b in zip(sent_bytes(names), before, strict=True)]
        if not was_ended:
            self._report(when="after", sent_bytes=sent, **self._reached_after())
        return code

    def _reached_after(self) -> dict[str, object]:
        """Measure the links again; an error is reported, but must not fail the finished run."""
        try:
            return {"reached_bits_s": self._reached()}
        except (ClusterError, OSError) as error:
            return {"reached_bits_s": [], "why": str(error)}

    def _reached(self) -> list[int]:
        hosts = list(self.hosts.values())
        return [round(rate) for rate in reached_bits_s(self.network, hosts, self.home)]

    def _environment(self) -> dict[str, str]:
        hosts = {name: dict(host.descriptors) for name, host in self.hosts.items()}
        own = {
            VARIABLE: written(os.getpid(), hosts),
            "QSGD_CLUSTER_PYTHON": sys.executable,
        }
        return {**os.environ, **own}

    def _report(self, **facts: object) -> None:
        text = json.dumps(facts)
        if self.task.token == "-":
            print(text, file=sys.stderr, flush=True)
        else:
            frame = encode(self.task.token.encode(), NETWORK, 0, text.encode())
            sys.stderr.buffer.write(frame)
            sys.stderr.flush()


def _run_passing_signals(
    words: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int]
) -> tuple[int, bool]:
    """Run a program to its end; return its code, and whether a signal requested its end."""
    arrived: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)
        if process is not None:
            process.send_signal(number)

    for name in (*_ENDING, *_PASSED):
        signal.signal(name, forward)
    process = subprocess.Popen(words, env=environ, preexec_fn=prepare_mpiexec, pass_fds=descriptors)
    for number in arrived:  # signals that arrived while it was starting
        process.send_signal(number)
    return process.wait(), not set(arrived).isdisjoint(_ENDING)


def _name_hosts(count: int) -> None:
    """Make /etc/hosts the only source of the hosts' addresses, within this cluster only.

    A name server cannot be reached from the cluster, and a program that queries one (as
    torch.distributed does for a peer's IPv6 address) would wait ten seconds for each query.
    """
    _replace(Path("/etc/hosts"), hosts_file(count, os.uname().nodename))
    _replace(Path("/etc/resolv.conf"), "")


def _replace(path: Path, text: str) -> None:
    """Replace the content of a file of this machine, if it exists, within this cluster only."""
    if not path.exists():
        return
    with tempfile.NamedTemporaryFile("w", prefix=f"qsgd-{path.stem}-") as file:
        file.write(text)
        file.flush()
        Path(file.name).chmod(0o644)
        hide_file(path, Path(file.name))  # the mount stays when the name is removed
