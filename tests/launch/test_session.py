"""A run whose launcher misbehaves."""

from __future__ import annotations

import os
from pathlib import Path

from qsgd_hpc.launch.command import Command
from qsgd_hpc.launch.mpi import Family, Launcher
from qsgd_hpc.launch.options import RunOptions
from qsgd_hpc.launch.session import Session


def test_ranks_that_do_not_start_in_time_are_named(capfd):
    options = RunOptions(2, ("true",), start_timeout_s=0.5)
    launcher = Launcher(Family.HYDRA, Path("sleep"), "")
    session = Session(options, launcher, "token", grace_s=1, warning_s=60)
    assert session.run(Command(("sleep", "60"), {}), dict(os.environ)) == 1
    said = capfd.readouterr().err
    assert "ranks 0, 1 had not started 0.5 s after mpiexec (--start-timeout)" in said
