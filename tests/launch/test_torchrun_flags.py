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
    ],
)
def test_flags_of_torchrun_are_refused_with_what_to_use_instead(flags: list[str], instead: str):
    with pytest.raises(UsageError, match=instead):
        CliRunner().invoke(cli, ["run", *flags, "t.py"], catch_exceptions=False)


def test_other_unknown_flags_are_answered_with_similar_ones():
    done = CliRunner().invoke(cli, ["run", "--ranks-per-nod", "2", "t.py"])
    assert done.exit_code == 2
    assert "Did you mean '--ranks-per-node'" in done.output
