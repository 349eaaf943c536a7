"""Who is said to be missing from init(), and when the wait is over. On real ranks: tests/mpi."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap

import pytest

from qsgd_hpc.runtime.roll_call import seat_of

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "PMIX_NAMESPACE": "prterun-host-1@1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_APID": "a-b",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "QSGD_RANKS": "4",
}


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        (SLURM, (3, 5, 1, 2)),
        ({**SLURM, "SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}, (4, 5, 0, 1)),
        ({**SLURM, "PMI_SIZE": "5", "PMI_RANK": "3"}, (3, 5, 1, 2)),
        (OPEN_MPI, (3, 4, 1, 2)),
        (PALS, (3, 4, 1, 2)),
    ],
)
def test_a_seat_is_read_from_the_launchers_variables(
    environ: dict[str, str], numbers: tuple[int, int, int, int]
) -> None:
    seat = seat_of(environ)
    assert seat is not None
    assert (seat.rank, seat.ranks, seat.local_rank, seat.local_size) == numbers
    neighbour = seat_of(environ)
    assert neighbour is not None
    assert neighbour.launch == seat.launch


def test_two_launches_on_a_host_are_two() -> None:
    first, second = seat_of(SLURM), seat_of({**SLURM, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert first.launch != second.launch


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script: Slurm gives it a rank, but it is no rank of any step.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        # A launcher that says neither how many there are nor which launch it is.
        {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2"},
        {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"},
    ],
)
def test_what_is_not_told_is_not_guessed(environ: dict[str, str]) -> None:
    assert seat_of(environ) is None


def waits(local_size: int, ranks: int, present: int) -> subprocess.CompletedProcess[str]:
    """Run a process in which rank 0 waits together with others until the time is over."""
    code = f"""
        import time, qsgd_hpc._core as core
        calls = [
            core.RollCall(
                launch={secrets.token_hex(4)!r}, host="nid0001", rank=r, ranks={ranks},
                local_rank=r, local_size={local_size},
                warning_s=0.2 if r == 0 else 0.0, shutdown_s=1.0 if r == 0 else 0.0,
            )
            for r in range({present})
        ]
        time.sleep(100)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )


@pytest.mark.parametrize(
    ("local_size", "ranks", "present", "words"),
    [
        (3, 3, 1, "ranks 1, 2 of the 3 on host nid0001 have not called it"),
        (3, 3, 2, "rank 2 of the 3 on host nid0001 has not called it"),
        (3, 9, 2, "local rank 2 of the 3 on host nid0001 has not called it"),
        (2, 2, 2, "all 2 have called it, but MPI does not connect them"),
        (2, 4, 2, "all 2 on host nid0001 have called it, of 4 in all"),
    ],
)
def test_a_wait_names_who_is_missing_and_ends_when_its_time_is_over(
    local_size: int, ranks: int, present: int, words: str
) -> None:
    done = waits(local_size, ranks, present)
    assert done.returncode == 1
    assert f"rank 0 has waited 0.2 s in init() for the other ranks: {words}" in done.stderr
    assert f"rank 0 has waited 1 s in init() for the other ranks: {words}" in done.stderr
    assert "rank 0 ends: it has waited as long as QSGD_STALL_SHUTDOWN_S" in done.stderr


def test_who_has_come_waits_no_longer() -> None:
    code = """
        import qsgd_hpc._core as core
        call = core.RollCall(launch="x", host="h", rank=0, ranks=2, local_rank=0, local_size=2,
                             warning_s=1000.0, shutdown_s=0.0)
        call.end()
        call.end()
        del call
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
