"""A real Slurm of several nodes on this one machine: controller, accounting and a slurmd per node.

Debian's slurmd takes part in a cluster of its own kind only when every node has its own name, port
and host name, so each runs in a UTS and a mount namespace of its own, where `hostname` and
/etc/hosts say who it is. GPUs are copies of /dev/null. Needs root, and the Debian packages that
`tests/slurm/install.sh` installs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import MARK

__all__ = ["Bed", "missing"]

PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db")
START_S = 60.0


def missing() -> str | None:
    """Return why no bed can be made here, or None."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; `make slurm` installs it"
    own = ["unshare", "--mount", "--uts", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    done = subprocess.run(own, capture_output=True, text=True, check=False)
    return f"no namespaces for nodes here: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Bed:
    """One private cluster in a folder; ``variables`` make Slurm's commands talk to it.

    ``beside``: another one whose accounting and MUNGE it uses, so that each knows the other.
    """

    folder: Path
    cluster: str = "bed"
    beside: Bed | None = None
    nodes: int = 4
    cpus: int = 8
    gpus: int = 4
    forget_s: int = 300  # squeue knows an ended job for so long
    # A daemon that one test starts again belongs to the tests after it, too.
    mark: str = field(default_factory=lambda: os.environ.get(MARK, ""))
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)  # controller, accounting, database, nodes

    @property
    def names(self) -> list[str]:
        return [f"{self._prefix}{n:04d}" for n in range(1, self.nodes + 1)]

    @property
    def _prefix(self) -> str:
        return self.cluster if self.beside else "nid"

    @property
    def _services(self) -> Bed:
        """The cluster that runs accounting and MUNGE."""
        return self.beside or self

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables, MARK: self.mark}

    def up(self) -> None:
        """Start everything and return when all nodes are idle."""
        for name in ("log", "run", "state", "spool", "database"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.ports = _free_ports(3 + self.nodes)  # another bed may be up
        self._write_files()
        if not self.beside:
            self._start_munge()
            self._start_accounting()
        self._register()
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        self._until(lambda: self._idle() == self.nodes, "all nodes to be idle")

    def down(self) -> None:
        """End everything, nodes first; jobs that are left are killed with their nodes."""
        for name in reversed(list(self.running)):
            self.stop(name)
        with contextlib.suppress(OSError, ValueError):  # nothing where another cluster has it
            os.kill(int((self.folder / "run/munged.pid").read_text()), signal.SIGTERM)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one daemon: a node by its name, ``controller``, ``accounting`` or ``database``."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start_controller(self) -> None:
        self._start("controller", ["slurmctld", "-D"])
        self._until(lambda: self._asked("scontrol", "ping") is not None, "the controller")

    def start_node(self, name: str) -> None:
        """Start a slurmd with a host name, and memory for sharing, of its own."""
        script = (
            'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && '
            "mount -t tmpfs none /dev/shm && "
            'exec slurmd -D -N "$1" -f "$2/slurm.conf"'
        )
        # Not in a process namespace: MPI's shared memory between ranks would not work across two.
        own = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", name, str(self.folder)]
        self._start(name, own)

    def kill_node(self, name: str) -> None:
        """Let a node die with all that runs on it, as a failed power supply does."""
        process = self.running[name]
        namespace = Path(f"/proc/{process.pid}/ns/mnt").readlink()
        stopped: list[int] = []
        # All stand still before the first dies, so that none can tell of another's death.
        while fresh := [pid for pid in _inside(namespace) if pid not in stopped]:
            for pid in fresh:
                os.kill(pid, signal.SIGSTOP)
            stopped += fresh
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stop(name)

    def _idle(self) -> int:
        answer = self._asked("sinfo", "-h", "-p", "regular", "-t", "idle", "-o", "%D")
        return int(answer or 0)

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self.running[name] = subprocess.Popen(
                argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _asked(self, *argv: str) -> str | None:
        done = subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    def _until(self, condition: object, what: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not condition():  # type: ignore[operator]
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline_s:
                raise RuntimeError(f"waiting for {what}; dead: {dead}; see {self.folder}/log")
            time.sleep(0.1)

    def _start_munge(self) -> None:
        run = self.folder / "run"
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        argv = ["munged", "--force", f"--key-file={key}", f"--socket={run}/munge.sock"]
        argv += [f"--pid-file={run}/munged.pid", f"--seed-file={run}/munged.seed"]
        argv += [f"--log-file={self.folder}/log/munged.log", "--num-threads=2"]
        subprocess.run(argv, check=True, capture_output=True)

    def _start_accounting(self) -> None:
        data, run = self.folder / "database", self.folder / "run"
        for path in (data, run):
            shutil.chown(path, "mysql", "mysql")
        subprocess.run(
            ["mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db"],
            check=True,
            capture_output=True,
        )
        argv = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}"]
        argv += [f"--socket={run}/database.sock", f"--pid-file={run}/database.pid"]
        argv += ["--bind-address=127.0.0.1", f"--port={self.ports[2]}"]
        argv += ["--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0"]
        self._start("database", argv)
        sql = (
            "create database if not exists slurm_acct_db;"
            "create user if not exists slurm@'127.0.0.1' identified by 'slurm';"
            "grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
        )
        client = ["mariadb", "--no-defaults", "-S", f"{run}/database.sock", "-e", sql]
        self._until(lambda: self._asked(*client) is not None, "the database")
        self._start("accounting", ["slurmdbd", "-D"])

    def _register(self) -> None:
        """Make the cluster, an account and limits known to accounting."""
        manager = ["sacctmgr", "-i"]
        add = ["add", "cluster", self.cluster]
        self._until(lambda: self._asked(*manager, *add) is not None, "accounting")
        limits = (
            "add qos regular set MaxWall=2-00:00:00 Flags=DenyOnLimit",
            "add qos debug set MaxWall=00:30:00 MaxTRESPerJob=node=2 Flags=DenyOnLimit",
        )
        for words in (
            f"add account myproject_g Cluster={self.cluster}",
            *(() if self.beside else limits),
            f"add user root Account=myproject_g Cluster={self.cluster}",
            "modify user root set qos=normal,regular,debug",
        ):
            subprocess.run(
                [*manager, *words.split()], env=self._environment, check=True, capture_output=True
            )

    def _write_files(self) -> None:
        devices = self.folder / "gpu"
        devices.mkdir(exist_ok=True)
        for gpu in range(self.gpus):
            if not (devices / f"gpu{gpu}").exists():
                os.mknod(devices / f"gpu{gpu}", 0o20666, os.makedev(1, 3))
        own = "".join(f"127.0.0.1 {name}\n" for name in self.names)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        names = f"{self._prefix}[0001-{self.nodes:04d}]"
        (self.folder / "gres.conf").write_text(
            f"NodeName={names} Name=gpu File={devices}/gpu[0-{self.gpus - 1}]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.folder / "slurmdbd.conf").write_text(self._accounting_settings())
        (self.folder / "slurmdbd.conf").chmod(0o600)
        (self.folder / "slurm.conf").write_text(self._settings(names))

    def _accounting_settings(self) -> str:
        return f"""\
AuthType=auth/munge
AuthInfo=socket={self.folder}/run/munge.sock
DbdHost={socket.gethostname().split(".")[0]}
DbdAddr=127.0.0.1
DbdPort={self.ports[1]}
SlurmUser=root
LogFile={self.folder}/log/slurmdbd.log
PidFile={self.folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={self.ports[2]}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""

    def _settings(self, names: str) -> str:
        nodes = "".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={self.ports[2 + n]} "
            f"CPUs={self.cpus} CoresPerSocket={self.cpus} RealMemory=4000 Gres=gpu:{self.gpus} "
            "Feature=gpu State=UNKNOWN\n"
            for n, name in enumerate(self.names, 1)
        )
        return f"""\
ClusterName={self.cluster}
SlurmctldHost={socket.gethostname().split(".")[0]}(127.0.0.1)
SlurmctldPort={self.ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._services.folder}/run/munge.sock
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/run/slurmctld.pid
SlurmdPidFile={self.folder}/run/slurmd-%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
ReturnToService=2
KillWait=5
SlurmdTimeout=5
MinJobAge={self.forget_s}
EnforcePartLimits=ALL
MailProg=/bin/true
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self._services.ports[1]}
AccountingStoragePass={self._services.folder}/run/munge.sock
AccountingStorageEnforce=associations,limits,qos
{nodes}PartitionName=regular Nodes={names} Default=YES MaxTime=2-0 OverSubscribe=EXCLUSIVE
PartitionName=debug Nodes={names} MaxTime=00:05:00 MaxNodes=2 OverSubscribe=EXCLUSIVE
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _inside(namespace: Path) -> list[int]:
    """Return the processes of a mount namespace, Slurm's own first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "ns/mnt").readlink() == namespace:
                slurms = (entry / "comm").read_text().startswith("slurm")
                found.append((not slurms, int(entry.name)))
    return [pid for _, pid in sorted(found)]
