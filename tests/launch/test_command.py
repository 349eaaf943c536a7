"""The command line per launcher family, against golden files."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.command import START_UP, SUPERVISOR, Machine, build_command, placement_fault
from qsgd_hpc.launch.mpi import Family, Launcher, Library, family_of, find_launcher
from qsgd_hpc.launch.options import Host, RunOptions, local_ranks, parse_hosts, placement
from qsgd_hpc.launch.supervise import slurm_tasks

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
HOSTS = (Host("n1", 2), Host("n2", 2))
CASES = {
    "local": (RunOptions(2, ("python", "train.py", "--lr", "0.1 x")), Machine(8)),
    "crowded_root": (RunOptions(4, ("./a.out",), bits=4), Machine(2, is_root=True)),
    "hosts": (
        RunOptions(
            4,
            ("python", "t.py"),
            HOSTS,
            bits=8,
            ranks_per_node=2,
            env={"A": "b c"},
            mpi_args=("-x", "y"),
        ),
        Machine(64),
    ),
}
ENVIRON = {"PATH": "/bin", "HOME": "/home/u", "EDITOR": "vi", "PYTHONPATH": "/p"}


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("case", CASES)
def test_command_line_is_as_recorded(family: Family, case: str) -> None:
    options, machine = CASES[case]
    program = "srun" if family is Family.SRUN else "mpiexec"
    launcher = Launcher(family, Path("/mpi/bin") / program, "")
    command = build_command(options, launcher, machine, ENVIRON, token="T0K3N")
    text = "".join(f"{name}={value}\n" for name, value in command.env.items())
    text += shlex.join(command.argv).replace(str(SUPERVISOR), "supervise.py") + "\n"
    text = text.replace(sys.executable, "PYTHON").replace(str(START_UP), "START_UP")
    file = GOLDEN / f"{family.name.lower()}_{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_what_the_user_set_is_left_alone() -> None:
    environ = {
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "0",
        "PYTHONHASHSEED": "random",
        "MPIR_CVAR_CH4_NETMOD": "ucx",
        "FI_TCP_IFACE": "eth1",
    }
    launcher = Launcher(Family.HYDRA, Path("mpiexec"), "")
    options = RunOptions(2, ("x",), torchrun=False)
    assert build_command(options, launcher, Machine(8), environ).env == {"QSGD_RANKS": "2"}


def test_bits_of_the_command_line_come_before_variables_for_the_ranks() -> None:
    launcher = Launcher(Family.HYDRA, Path("mpiexec"), "")
    given = {"QSGD_BITS": "8"}
    for bits, found in ((4, "4"), (None, "8")):
        options = RunOptions(2, ("x",), bits=bits, env=given)
        assert build_command(options, launcher, Machine(8), {}).env["QSGD_BITS"] == found


def test_hosts_fill_up_in_order_and_unused_ones_are_left_out() -> None:
    hosts = (Host("a", 2), Host("b", 4), Host("c", 1))
    assert placement(RunOptions(5, (), hosts)) == [("a", 2), ("b", 3)]


def test_local_ranks_counts_the_fullest_host() -> None:
    assert local_ranks(RunOptions(5, ())) == 5
    assert local_ranks(RunOptions(5, (), (Host("a", 2), Host("b", 4)))) == 3
    assert local_ranks(RunOptions(1, (), HOSTS)) == 1


@pytest.mark.parametrize(
    ("family", "ranks", "slots", "threads"),
    [
        (Family.HYDRA, 16, "4(x4)", "16"),
        (Family.OPEN_MPI, 16, "1(x4)", "16"),
        (Family.HYDRA, 16, "64(x4)", "4"),  # fills the first node
        (Family.SRUN, 16, "64(x4)", "16"),
        (Family.PALS, 5, "2(x2),1", "32"),
    ],
)
def test_ranks_share_the_cores_of_their_node_of_a_job(
    tmp_path: Path, family: Family, ranks: int, slots: str, threads: str
) -> None:
    file = tmp_path / "nodes"
    file.write_text("".join(f"n{i}\n" * count for i, count in enumerate(slurm_tasks(slots))))
    launcher = Launcher(family, Path("m"), "")
    for environ in ({"SLURM_TASKS_PER_NODE": slots}, {"PBS_NODEFILE": str(file)}):
        command = build_command(RunOptions(ranks, ("x",)), launcher, Machine(64), environ)
        assert command.env["OMP_NUM_THREADS"] == threads
        assert "--oversubscribe" not in command.argv


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("HYDRA build details:\n    Version:  5.0.2", Family.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 2024", Family.INTEL),
        ("mpiexec (Open MPI) 5.0.11", Family.OPEN_MPI),
        ("mpirun (Open MPI) 4.1.4", Family.OPEN_MPI),
        ("PALS 1.3.4", Family.PALS),
        ("slurm 23.11.4", Family.SRUN),
        ("a shell script", None),
    ],
)
def test_family_is_told_from_the_version(text: str, family: Family | None) -> None:
    assert family_of(text) is family


def _fake(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_own_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing" / "python"))
    return tmp_path


def test_the_librarys_own_mpiexec_comes_before_path(no_own_mpiexec: Path) -> None:
    root = no_own_mpiexec
    own = _fake(root / "mpi" / "bin", "mpiexec", "mpiexec (Open MPI) 5.0.11")
    _fake(root / "path", "mpiexec", "mpiexec (Open MPI) 4.0.0")
    library = Library("", "Open MPI", (5, 0, 11), root / "mpi" / "lib" / "libmpi.so.40")
    assert find_launcher(library, {"PATH": str(root / "path")}).path == own


def test_an_mpiexec_of_another_mpi_is_refused_with_the_remedy(no_own_mpiexec: Path) -> None:
    _fake(no_own_mpiexec / "path", "mpiexec", "mpiexec (Open MPI) 5.0.11")
    library = Library("", "MPICH", (5, 0, 2), Path("/opt/mpich/lib/libmpi.so.12"))
    with pytest.raises(UsageError, match=r"MPICH 5.0.2.*another MPI's.*Open MPI.*PATH"):
        find_launcher(library, {"PATH": str(no_own_mpiexec / "path")})


def test_no_mpiexec_at_all_names_the_remedy(no_own_mpiexec: Path) -> None:
    library = Library("", "MPICH", (5, 0, 2), None)
    with pytest.raises(UsageError, match=r"no mpiexec.*pip install 'qsgd-hpc\[mpich\]'"):
        find_launcher(library, {"PATH": str(no_own_mpiexec)})


def test_srun_serves_only_inside_a_slurm_job(no_own_mpiexec: Path) -> None:
    _fake(no_own_mpiexec, "srun", "slurm 23.11.4")
    library = Library("", "MPICH", (5, 0, 2), None)
    environ = {"PATH": str(no_own_mpiexec), "SLURM_JOB_ID": "7"}
    assert find_launcher(library, environ).family is Family.SRUN
    with pytest.raises(UsageError, match="no mpiexec"):
        find_launcher(library, {"PATH": str(no_own_mpiexec)})


def test_horovod_goes_first_on_the_path_of_the_ranks() -> None:
    launcher = Launcher(Family.OPEN_MPI, Path("mpiexec"), "")
    for options, environ in (
        (RunOptions(2, ("x",), horovod=True), {"PYTHONPATH": "/mine"}),
        (RunOptions(2, ("x",), horovod=True, env={"PYTHONPATH": "/mine"}), {}),
    ):
        command = build_command(options, launcher, Machine(8), environ)
        assert command.env["PYTHONPATH"].endswith("horovod_compat/on_path:/mine")
        assert "-x PYTHONPATH" in " ".join(command.argv)
    alone = build_command(RunOptions(2, ("x",), horovod=True), launcher, Machine(8), {})
    assert Path(alone.env["PYTHONPATH"], "horovod", "__init__.py").is_file()


def test_open_mpi_passes_the_variables_of_frameworks_and_their_transports() -> None:
    names = {"GLOO_SOCKET_IFNAME", "JAX_PLATFORMS", "KERAS_BACKEND", "PYTORCH_CUDA_ALLOC_CONF"}
    names |= {"TF_CPP_MIN_LOG_LEVEL", "WANDB_MODE", "XLA_FLAGS"}
    environ = dict.fromkeys((*names, "EDITOR"), "x")
    launcher = Launcher(Family.OPEN_MPI, Path("m"), "")
    argv = build_command(RunOptions(2, ("x",)), launcher, Machine(8), environ).argv
    passed = {value for flag, value in pairwise(argv) if flag == "-x"}
    assert names <= passed
    assert "EDITOR" not in passed


@pytest.mark.parametrize(
    ("family", "ranks", "hosts", "remedy"),
    [
        (Family.PALS, 5, "b:3,a:3", None),
        (Family.PALS, 5, "a:2,b:3", "a:3,b:3"),
        (Family.PALS, 9, "a:4,b:4,c:4", None),
        (Family.SRUN, 9, "a:4,b:4,c:4", "a:3,b:3,c:3"),
        (Family.SRUN, 5, "n2:3,n10:3", None),
        (Family.SRUN, 5, "n10:3,n2:3", "n2:3,n10:2"),
        (Family.SRUN, 2, "n1:2,n2:2", None),
        (Family.HYDRA, 5, "b:2,a:3", None),
        (Family.SRUN, 5, "", None),
    ],
)
def test_hosts_that_the_launcher_would_fill_otherwise_are_refused(
    family: Family, ranks: int, hosts: str, remedy: str | None
) -> None:
    options = RunOptions(ranks, ("x",), parse_hosts(hosts) if hosts else ())
    fault = placement_fault(options, family)
    assert (fault and fault.rpartition("; use -H ")[2]) == remedy
    if remedy is not None:
        mended = RunOptions(ranks, ("x",), parse_hosts(remedy))
        assert placement_fault(mended, family) is None


def test_srun_uses_only_the_hosts_with_ranks() -> None:
    launcher = Launcher(Family.SRUN, Path("srun"), "")
    argv = build_command(RunOptions(2, ("x",), HOSTS), launcher, Machine(8), {}).argv
    assert {("--nodelist", "n1"), ("--nodes", "1")} <= set(pairwise(argv))


@pytest.mark.parametrize(
    ("ranks", "more", "mpi_args", "is_passed"),
    [
        (8, {}, (), True),
        (9, {}, (), False),  # more ranks than the job has tasks
        (8, {"SRUN_CPUS_PER_TASK": "2"}, (), False),
        (8, {}, ("-c2",), False),
        (8, {}, ("--cpus-per-task=2",), False),
    ],
)
def test_srun_gets_the_cpus_per_task_of_the_job(
    ranks: int, more: dict[str, str], mpi_args: tuple[str, ...], is_passed: bool
) -> None:
    environ = {"SLURM_CPUS_PER_TASK": "16", "SLURM_TASKS_PER_NODE": "4(x2)", **more}
    options = RunOptions(ranks, ("x",), mpi_args=mpi_args)
    argv = build_command(options, Launcher(Family.SRUN, Path("s"), ""), Machine(64), environ).argv
    assert (("--cpus-per-task", "16") in pairwise(argv)) is is_passed


def test_interfaces_are_named_in_the_launchers_own_words() -> None:
    options = RunOptions(2, ("x",), network_interfaces=("eth0", "ib0"))
    words = {Family.HYDRA: "-iface eth0", Family.OPEN_MPI: "--mca btl_tcp_if_include eth0,ib0"}
    for family, expected in words.items():
        command = build_command(options, Launcher(family, Path("m"), ""), Machine(8), {})
        assert expected in " ".join(command.argv)
