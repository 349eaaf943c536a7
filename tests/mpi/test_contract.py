"""The contract of qsgd_hpc.torch on 1 to 4 real ranks, under every MPI at hand: one binary."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_contract_holds_on_real_ranks(run_ranks, python, ranks):
    done = run_ranks(
        ranks, python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/contract"
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    # Every rank ran, and none ran nothing.
    assert len(re.findall(r"\d{2} passed", done.stdout)) == ranks, done.stdout[-2000:]


def test_nodes_may_be_simulated(run_ranks, python, tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(
        "import qsgd_hpc.torch as hvd\n"
        "hvd.init()\n"
        "print('facts', hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),"
        " hvd.cross_size(), flush=True)\n"
    )
    done = run_ranks(4, "--ranks-per-node", "2", python, str(script))
    facts = sorted(line for line in done.stdout.splitlines() if line.startswith("facts"))
    assert facts == ["facts 0 0 2 0 2", "facts 1 1 2 0 2", "facts 2 0 2 1 2", "facts 3 1 2 1 2"]
