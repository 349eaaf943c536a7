"""Flags of torchrun in ``qsgd-hpc run``."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        (["--nproc_per_node", "2"], "--nproc_per_node is a flag of torchrun: -np takes"),
        (["--nproc-per-node=2"], "-np takes the number of all ranks"),
        (["--standalone"], "leave it out"),
        (["-np", "2", "-m", "package.train"], "python -m MODULE"),
        (["--rdzv-conf", "timeout=9"], "leave it out: run decides where the ranks meet"),
        (["--local_addr=node1"], "leave it out: run decides where the ranks meet"),
        (["--log-dir", "logs"], "--output-filename FOLDER"),
        (["--redirects", "3"], "--output-filename FOLDER"),
        (["-t", "3"], "--prefix-output"),
        (["--monitor_interval", "1"], "leave it out"),
        (["--role", "trainer"], "leave it out"),
        (["--start-method", "fork"], "leave it out"),
        (["--no-python"], "write the program in place of the script"),
    ],
)
def test_flags_of_torchrun_are_refused_with_what_to_use_instead(flags: list[str], instead: str):
    with pytest.raises(UsageError, match=instead):
        CliRunner().invoke(cli, ["run", *flags, "t.py"], catch_exceptions=False)


def test_other_unknown_flags_are_answered_with_similar_ones():
    done = CliRunner().invoke(cli, ["run", "--ranks-per-nod", "2", "t.py"])
    assert done.exit_code == 2
    assert "Did you mean '--ranks-per-node'" in done.output
