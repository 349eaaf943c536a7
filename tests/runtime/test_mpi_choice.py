"""Which MPI is taken, what is said of one that cannot be, and where a rank is on its nodes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.claims import no_mpi
from qsgd_hpc.runtime.mpi_binding import Layout, _pointer_handles

UNEVEN = [[0, 3, 4], [1], [2, 5]]


def library(vendor: str, width: int) -> SimpleNamespace:
    """What mpi4py says of an MPI: the two answers that the choice depends on."""
    return SimpleNamespace(
        get_vendor=lambda: (vendor, (1, 0, 0)), _sizeof=lambda comm: width, COMM_WORLD=None
    )


@pytest.mark.parametrize(
    ("vendor", "width", "pointers"),
    [("MPICH", 4, False), ("Intel MPI", 4, False), ("Open MPI", 8, True), ("MPICH", 8, True)],
)
def test_the_width_of_a_handle_decides(vendor, width, pointers):
    assert _pointer_handles(library(vendor, width), "its version") is pointers


def test_an_unknown_mpi_is_named_and_can_be_tried(monkeypatch):
    with pytest.raises(UsageError, match=r"unknown MPI library: FooMPI 3.*QSGD_MPI_ABI=int"):
        _pointer_handles(library("FooMPI", 4), "FooMPI 3")
    monkeypatch.setenv("QSGD_MPI_ABI", "int")
    assert _pointer_handles(library("FooMPI", 4), "FooMPI 3") is False
    with pytest.raises(UsageError, match="unset it"):
        _pointer_handles(library("FooMPI", 8), "FooMPI 3")


def test_no_mpi_at_all_says_what_to_do(tmp_path):
    (tmp_path / "libempty.so").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", "import qsgd_hpc.runtime.basics as b; b.init()"],
        env={"MPI4PY_LIBMPI": str(tmp_path / "libempty.so"), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no MPI library can be loaded" in done.stderr
    assert f"; correct or unset MPI4PY_LIBMPI={tmp_path}" in done.stderr
    assert "pip install 'qsgd-hpc[mpich]'" in no_mpi({})


@pytest.mark.parametrize(
    ("first", "finalised"),
    [("mpi_binding.start_mpi()", True), ("from mpi4py import MPI", False)],
    ids=["ours", "the-scripts"],
)
def test_who_started_mpi_finalises_it(first, finalised):
    """However often it is asked for; else what MPI keeps in shared memory stays behind."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sys.modules['mpi4py.MPI'].Is_finalized()))  # runs last\n"
        "from qsgd_hpc.runtime import direct, mpi_binding\n"
        f"{first}\n"
        "with direct.communicator():\n"
        "    pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(finalised)


def test_importing_the_package_starts_nothing():
    code = (
        "import sys, qsgd_hpc, qsgd_hpc.cli, qsgd_hpc.jobs, qsgd_hpc.launch, qsgd_hpc.scaling;"
        "print([m for m in ('mpi4py', 'torch', 'qsgd_hpc._core', 'pandas', 'matplotlib')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("rank", "node", "local_rank", "across"),
    [
        (0, [0, 3, 4], 0, [0, 1, 2]),
        (1, [1], 0, [0, 1, 2]),
        (3, [0, 3, 4], 1, [3, 5]),
        (4, [0, 3, 4], 2, [4]),
        (5, [2, 5], 1, [3, 5]),
    ],
)
def test_a_rank_finds_its_place(rank, node, local_rank, across):
    layout = Layout(UNEVEN, rank)
    assert (layout.node, layout.local_rank, layout.across) == (node, local_rank, across)
    assert not layout.homogeneous


def test_nodes_of_equally_many_ranks_are_homogeneous():
    assert Layout([[0, 2], [1, 3]], 3).homogeneous
