"""Command lines that start the ranks, by a pure function per launcher family, and usable cores."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qsgd_hpc.launch.cluster import keeper
from qsgd_hpc.launch.cluster.network import LAUNCHER, SUBNET
from qsgd_hpc.launch.mpi import Family, Launcher
from qsgd_hpc.launch.options import RunOptions, bits_variables, local_ranks, placement
from qsgd_hpc.launch.rendezvous import Rendezvous
from qsgd_hpc.launch.schedulers import NODE_FILES, in_batch_job
from qsgd_hpc.launch.supervise import COLON, slurm_tasks

__all__ = ["Command", "Machine", "build_command", "placement_fault", "usable_cores"]

ENTER = Path(keeper.__file__).with_name("enter.sh")
SUPERVISOR = Path(__file__).with_name("supervise.py")
HOROVOD = Path(__file__).parents[1] / "horovod_compat" / "on_path"
START_UP = Path(__file__).with_name("start_up")
PASSED_NAMES = re.compile(
    r"QSGD_|HOROVOD_|MASTER_|OMP_|PYTHON|PYTORCH_|MKL_|OPENBLAS_|NCCL_|GLOO_|CUDA_|HIP_|ROCR_|FI_"
    r"|UCX_|MPI4PY_|HF_|TORCH_|TF_|KERAS_|XLA_|JAX_|WANDB_"
    r"|(PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|HOME|TMPDIR|LANG|http_proxy"
    r"|https_proxy|no_proxy)$"
)

# Variables on emulated hosts, which make all libraries use the shaped link.
_ON_HOSTS = {
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
    # Measurements between these hosts do not apply to the next run's hosts.
    "QSGD_PLAN_CACHE": "0",
}


@dataclass(frozen=True)
class Machine:
    """The relevant properties of this machine: usable cores, and whether the user is root."""

    cores: int
    is_root: bool = False


@dataclass(frozen=True)
class Command:
    """The command: argv, and the variables that it adds to the inherited ones."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def build_command(
    options: RunOptions,
    launcher: Launcher,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    token: str = "-",
    rendezvous: Rendezvous | None = None,
) -> Command:
    """Return mpiexec's command line and environment.

    Args:
        options: a checked request; its command's program exists.
        launcher: the mpiexec.
        machine: this machine.
        environ: the inherited environment.
        token: marks this run's frames; "-" starts the ranks without output frames.
        rendezvous: shared values for torch.distributed; None: none.
    """
    env = _environment(options, launcher, machine, environ)
    if rendezvous is not None:
        shared = {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}
        env |= {name: value for name, value in shared.items() if name not in {**environ, **env}}
    # Slurm forwards at most 1024 bytes of output in one piece, the others 4096 or more.
    frame_bytes = "1000" if launcher.family is Family.SRUN else "4096"
    shared_values = rendezvous.word if rendezvous else "-"
    supervisor = (sys.executable, "-I", "-S", str(SUPERVISOR), token, frame_bytes, shared_values)
    arguments = [COLON if argument == ":" else argument for argument in options.command]
    program = [*supervisor, *arguments]
    inherited = {**environ, **env}
    if launcher.family is Family.INTEL:
        sections = _intel_sections(options, program)
        tail = ["-disable-auto-cleanup", *options.mpi_args, *sections]
    else:
        flags = {
            Family.HYDRA: _hydra,
            Family.OPEN_MPI: _open_mpi,
            Family.PALS: _pals,
            Family.SRUN: _srun,
        }[launcher.family]
        tail = [*flags(options, machine, inherited), *options.mpi_args, *program]
    argv = (str(launcher.path), *tail)
    if options.network is not None:
        task = keeper.Task(options.network.text, len(options.nodes), token)
        argv = keeper.command(task, argv)
    return Command(argv, env)


def _environment(
    options: RunOptions, launcher: Launcher, machine: Machine, environ: Mapping[str, str]
) -> dict[str, str]:
    threads = max(1, machine.cores // _sharing(options, launcher.family, environ))
    # With one seed of hashes, sets have the same order on all ranks: some scripts number words so.
    env = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(threads)}
    if launcher.family is Family.HYDRA:
        env["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # faster than ucx over TCP, as measured
        if not options.hosts and not in_batch_job(environ):
            # All ranks are on one machine; an interface that goes down must not end them.
            env["FI_TCP_IFACE"] = "lo"
        if options.network_interfaces:
            env["FI_TCP_IFACE"] = options.network_interfaces[0]  # libfabric accepts only one
    env = {name: value for name, value in env.items() if not environ.get(name)}
    if options.network is not None:
        env |= _ON_HOSTS  # overrides the shell's values, which are for other hosts
    bits = bits_variables(options.bits, options.weight_bits)
    env |= bits
    if options.ranks_per_node is not None and options.network is None:
        env["QSGD_RANKS_PER_NODE"] = str(options.ranks_per_node)
    env |= {**options.env, **bits}  # --bits comes before --env
    env["QSGD_RANKS"] = str(options.ranks)  # init compares it with the ranks that MPI sees
    folders = [str(HOROVOD)] if options.horovod else []
    folders += [str(START_UP)] if options.sets_torchrun else []
    if folders:
        path = env.get("PYTHONPATH") or environ.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([*folders, *([path] if path else [])])
    return env


def _sharing(options: RunOptions, family: Family, environ: Mapping[str, str]) -> int:
    """Return the largest number of ranks that share a machine's cores."""
    if options.network is not None:
        return options.ranks  # emulated hosts share one machine
    slots = () if options.hosts else _job_slots(environ)
    if not slots:
        return local_ranks(options)
    # If there are enough slots, launchers fill one node after the other; srun uses all nodes.
    if sum(slots) >= options.ranks and family is not Family.SRUN:
        return min(options.ranks, max(slots))
    return -(-options.ranks // len(slots))


def _job_slots(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the slots of each node of the current batch job; () if there is none."""
    for name in NODE_FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return tuple(Counter(Path(environ.get(name, "")).read_text().split()).values())
    return tuple(slurm_tasks(environ.get("SLURM_TASKS_PER_NODE", "")))


def _host_list(options: RunOptions) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in options.nodes)


def _hydra(options: RunOptions, machine: Machine, environ: Mapping[str, str]) -> list[str]:
    # Survivors of a dead rank need time to report it; afterwards, their supervisors end them.
    hosts = ["-hosts", _host_list(options)] if options.nodes else []
    if options.network is not None:
        hosts += ["-launcher", "ssh", "-launcher-exec", str(ENTER), "-localhost", LAUNCHER]
        hosts += ["-disable-hostname-propagation"]
    iface = ["-iface", options.network_interfaces[0]] if options.network_interfaces else []
    return ["-disable-auto-cleanup", *iface, *hosts, "-n", str(options.ranks)]


def _intel_sections(options: RunOptions, program: list[str]) -> list[str]:
    """Return one section per host, because this Hydra's -hosts does not support slots."""
    sections = [["-host", name, "-n", str(count)] for name, count in placement(options)]
    argv: list[str] = []
    for section in sections or [["-n", str(options.ranks)]]:
        argv += [*([":"] if argv else []), *section, *program]
    return argv


def _open_mpi(options: RunOptions, machine: Machine, environ: Mapping[str, str]) -> list[str]:
    flags = ["--allow-run-as-root"] if machine.is_root else []
    flags += ["--enable-recovery"]  # does not end survivors of a dead rank, as above
    if options.nodes:
        flags += ["--host", _host_list(options)]
    if options.network is not None:
        flags += _open_mpi_on_hosts()
    if _sharing(options, Family.OPEN_MPI, environ) > machine.cores:
        flags += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # Open MPI by default binds a rank with all its threads to one core.
    if not any("bind-to" in arg for arg in options.mpi_args):
        flags += ["--bind-to", "none"]
    if options.network_interfaces:
        interfaces = ",".join(options.network_interfaces)
        for layer in ("btl", "oob"):
            flags += ["--mca", f"{layer}_tcp_if_include", interfaces]
    names = {name for name in environ if PASSED_NAMES.match(name)} | set(options.env)
    for name in sorted(names):
        flags += ["-x", name]
    return [*flags, "-n", str(options.ranks)]


def _open_mpi_on_hosts() -> list[str]:
    agent = {"plm_ssh_agent": str(ENTER), "plm_ssh_no_tree_spawn": "1", "prte_if_include": SUBNET}
    transport = {"pml": "ob1", "btl": "self,sm,tcp", "btl_tcp_if_include": SUBNET}
    flags = [word for name, value in agent.items() for word in ("--prtemca", name, value)]
    return flags + [w for name, value in transport.items() for w in ("--mca", name, value)]


def _pals(options: RunOptions, machine: Machine, environ: Mapping[str, str]) -> list[str]:
    flags = ["-n", str(options.ranks), "--ppn", str(local_ranks(options))]
    if options.hosts:
        flags += ["--hosts", ",".join(host.name for host in options.hosts)]
    else:
        flags = flags[:2]
    if not any("cpu-bind" in arg for arg in options.mpi_args):
        flags += ["--depth", environ["OMP_NUM_THREADS"], "--cpu-bind", "depth"]
    return [*flags, "--envall"]


def _srun(options: RunOptions, machine: Machine, environ: Mapping[str, str]) -> list[str]:
    flags = ["--ntasks", str(options.ranks), "--kill-on-bad-exit=0", "--wait=0", "--input=none"]
    if hosts := [name for name, _ in placement(options)]:
        flags += ["--nodelist", ",".join(hosts), "--nodes", str(len(hosts)), "--distribution=block"]
        flags += ["--ntasks-per-node", str(local_ranks(options))]
    # From Slurm 22.05 on, srun ignores the job's --cpus-per-task: without it, all threads of a rank
    # may share one core. With more ranks per node than the job has tasks, srun would refuse it.
    each = environ.get("SLURM_CPUS_PER_TASK")
    tasks = slurm_tasks(environ.get("SLURM_TASKS_PER_NODE", ""))
    is_set = environ.get("SRUN_CPUS_PER_TASK") or any(
        arg.startswith(("-c", "--cpus-per-task")) for arg in options.mpi_args
    )
    if each and not is_set and tasks and _sharing(options, Family.SRUN, environ) <= min(tasks):
        flags += ["--cpus-per-task", each]
    return [*flags, "--export=ALL"]


def placement_fault(options: RunOptions, family: Family) -> str | None:
    """Return why a launcher would place ranks otherwise than -H says, and the remedy, if it would.

    The ranks' LOCAL_RANK and MASTER_ADDR follow -H.
    """
    placed = placement(options)
    if not placed or family not in (Family.PALS, Family.SRUN):
        return None
    names = [name for name, _ in placed]
    each, rest = divmod(options.ranks, len(placed))
    if family is Family.PALS:
        counts = [count for _, count in placed]
        fits = set(counts[:-1]) <= {max(counts)}
        possible = [(name, each + (rest > 0)) for name in names]
        why = "the mpiexec of PALS starts equal numbers of ranks on all hosts but the last"
    else:
        names.sort(key=_by_numbers)
        possible = [(name, each + (i < rest)) for i, name in enumerate(names)]
        fits = placed == possible
        why = "srun spreads ranks evenly, in the order of the hosts' names"
    remedy = ",".join(f"{name}:{count}" for name, count in possible)
    return None if fits else f"-H: {why}; use -H {remedy}"


def _by_numbers(name: str) -> list[str | int]:
    """Return the key of a host's name for sorting, which puts n2 before n10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def usable_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the number of cores that this process can use: its affinity's, within its CPU quota.

    Containers are often limited by a quota (``docker run --cpus=2``, a Kubernetes limit). All cores
    of the machine are then visible, and as many threads would be stopped for most of the time. A
    quota of 1.5 cores counts as 2.

    Args:
        membership: the kernel's list of this process's control groups.
        root: the folder in which these are mounted.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups(membership, root):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = _quota(folder)
            cores = min(cores, max(1, -(-quota_us // period_us)))
    return cores


def _groups(membership: Path, root: Path) -> Iterator[Path]:
    """Yield the folders whose quotas apply to this process: its groups and those above them."""
    try:
        lines = membership.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = root / controllers if controllers else root
        # Without a namespace of its own, a container sees its path on the host, at another root.
        inner = Path(path.lstrip("/"))
        yield from (own / each for each in (inner, *inner.parents))


def _quota(folder: Path) -> tuple[int, int]:
    """Return time and period of a quota, in microseconds.

    Raises:
        OSError, ValueError: there is none.
    """
    if (both := folder / "cpu.max").exists():
        quota_us, period_us = map(int, both.read_text().split())  # ValueError for "max"
        return quota_us, period_us
    quota_us = int((folder / "cpu.cfs_quota_us").read_text())
    if quota_us <= 0:
        raise ValueError("no limit")
    return quota_us, int((folder / "cpu.cfs_period_us").read_text())
