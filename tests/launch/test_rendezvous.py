"""What ranks of torch.distributed are told, by every launcher, and the port that is theirs."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.command import Machine, build_command
from qsgd_hpc.launch.mpi import Family, Launcher
from qsgd_hpc.launch.options import Host, RunOptions
from qsgd_hpc.launch.rendezvous import Rendezvous, remarks, rendezvous
from qsgd_hpc.launch.supervise import torchrun_variables

TWO_HOSTS = (Host("far1", 2), Host("far2", 3))
OPTIONS = RunOptions(2, ("python", "t.py"))
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def told(word: str, monkeypatch: pytest.MonkeyPatch, **environ: str) -> tuple[int, ...]:
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = torchrun_variables(word, environ)
    assert found["NODE_RANK"] == found["GROUP_RANK"]
    return tuple(int(found[name]) for name in OWN)


@pytest.mark.parametrize(
    ("word", "environ", "expected"),
    [
        ("x,0,2", {"PMI_RANK": "1", "QSGD_RANKS": "2"}, (1, 2, 1, 2, 0, 1)),
        ("x,0,2+3", {"PMI_RANK": "2", "QSGD_RANKS": "5"}, (2, 5, 0, 3, 1, 2)),
        ("x,0,2+3", {"PMIX_RANK": "1", "PMI_RANK": "4", "QSGD_RANKS": "5"}, (4, 5, 2, 3, 1, 2)),
        ("x,0,2+3", {"OMPI_COMM_WORLD_RANK": "4", "QSGD_RANKS": "5"}, (4, 5, 2, 3, 1, 2)),
        ("x,0,", {"PMI_RANK": "5", "QSGD_RANKS": "8", "MPI_LOCALRANKID": "1",
                  "MPI_LOCALNRANKS": "4"}, (5, 8, 1, 4, 1, 2)),
        ("x,0,", {"PALS_RANKID": "5", "QSGD_RANKS": "6", "PALS_LOCAL_RANKID": "1",
                  "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "2"}, (5, 6, 1, 2, 2, 3)),
        ("x,0,", {"SLURM_PROCID": "4", "QSGD_RANKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
                  "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, (4, 5, 0, 1, 2, 5)),
        ("x,0,", {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "QSGD_RANKS": "4",
                  "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_LOCALID": "0"}, (3, 4, 1, 2, 1, 2)),
    ],
)  # fmt: skip
def test_each_rank_is_told_its_place(
    word: str, environ: dict[str, str], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(word, monkeypatch, **environ) == expected


def test_the_port_is_held_and_torchs_store_can_still_listen_there() -> None:
    with rendezvous(OPTIONS, {}) as place:
        assert place is not None
        assert (place.address, place.held, place.counts) == ("127.0.0.1", True, (2,))
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind(("", place.port))
        assert refused.value.errno == errno.EADDRINUSE
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", place.port))
            store.listen()
        with rendezvous(OPTIONS, {}) as beside:
            assert beside is not None
            assert beside.port != place.port
            assert beside.run_id != place.run_id


@pytest.mark.parametrize(
    ("options", "environ", "address", "held", "counts"),
    [
        (RunOptions(4, ("x",), TWO_HOSTS), {}, "far1", False, (2, 2)),
        (RunOptions(2, ("x",), (Host("localhost", 2),)), {}, "localhost", True, (2,)),
        (RunOptions(2, ("x",), (Host("localhost", 1), Host("far", 1))), {}, socket.gethostname(),
         True, (1, 1)),
        (RunOptions(3, ("x",), network=parse_network("1gbit"), ranks_per_node=2), {}, "node1",
         False, (2, 1)),
        (RunOptions(5, ("x",), ranks_per_node=2), {}, "127.0.0.1", True, (2, 2, 1)),
        (OPTIONS, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "nid[0007-0009,12],x1"}, "nid0007",
         False, ()),
        (OPTIONS, {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu1,gpu2"}, "gpu1", False, ()),
        (OPTIONS, {"PE_HOSTFILE": "/spool/pe_hostfile"}, socket.gethostname(), True, ()),
    ],
)  # fmt: skip
def test_ranks_meet_on_the_first_host(
    options: RunOptions, environ: dict[str, str], address: str, held: bool, counts: tuple[int, ...]
) -> None:
    with rendezvous(options, environ) as place:
        assert place is not None
        assert (place.address, place.held, place.counts) == (address, held, counts)


def test_the_node_file_of_a_batch_job_names_the_first_host(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("x3001.hsn\nx3002.hsn\n")
    with rendezvous(OPTIONS, {"PBS_JOBID": "7.s", "PBS_NODEFILE": str(file)}) as place:
        assert place is not None
        assert place.address == "x3001.hsn"


@pytest.mark.parametrize("family", list(Family))
def test_what_the_user_has_set_stays(family: Family) -> None:
    place = Rendezvous("r", "here", 4711, True, (2,))
    environ = {"MASTER_ADDR": "mine", "PATH": "/bin"}
    launcher = Launcher(family, Path("/bin/mpiexec"), "")
    command = build_command(OPTIONS, launcher, Machine(8), environ, rendezvous=place)
    assert "MASTER_ADDR" not in command.env
    assert command.env["MASTER_PORT"] == "4711"
    if family is Family.OPEN_MPI:  # it hands on what it is told to
        assert {"MASTER_ADDR", "MASTER_PORT"} <= set(command.argv)


def test_scripts_of_horovod_are_told_nothing_unless_asked_to() -> None:
    for torchrun, expected in ((None, False), (True, True)):
        options = RunOptions(2, ("x",), horovod=True, torchrun=torchrun)
        with rendezvous(options, {}) as place:
            assert (place is not None) is expected
    with rendezvous(RunOptions(2, ("x",), torchrun=False), {}) as place:
        assert place is None


def test_what_does_not_fit_is_told() -> None:
    assert list(remarks(OPTIONS, {"WORLD_SIZE": "2"})) == []
    (size,) = remarks(OPTIONS, {"WORLD_SIZE": "8"})
    assert size == "WORLD_SIZE=8 was set before; the ranks get 2, the value of -np"
    (starter,) = remarks(RunOptions(2, ("/v/bin/torchrun", "--standalone", "t.py")), {})
    assert "Remove it: `qsgd-hpc run -np 2 SCRIPT` sets what torchrun sets" in starter
    assert list(remarks(RunOptions(1, ("torchrun", "t.py")), {})) == []


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("torchrun t.py", "torchrun"),
        ("python -m torch.distributed.run t.py", "torch.distributed.run"),
        ("/v/bin/python3.11 /v/bin/accelerate launch t.py", "accelerate"),
        ("python t.py accelerate", None),
        ("t.py torchrun", None),
        ("python -m accelerate.test torchrun", None),
        ("python", None),
    ],
)
def test_a_program_that_starts_ranks_itself_is_known_by_its_place(
    command: str, named: str | None
) -> None:
    said = [line.split()[0] for line in remarks(RunOptions(2, tuple(command.split())), {})]
    assert said == ([named] if named else [])
