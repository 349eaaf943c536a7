"""The contract of every framework on 1 to 4 real ranks, and torch's under every MPI: one binary."""

from __future__ import annotations

import sys

import pytest

# What frameworks differ in lies above the engine, and the MPI below it.
UNDER_ONE_MPI = "not tensorflow and not keras and not jax and not numpy"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_contract_holds_on_real_ranks(run_suite, python, ranks):
    if python != sys.executable:
        run_suite(ranks, "tests/contract", "-k", UNDER_ONE_MPI)
    elif ranks == 1:
        pytest.skip("plain pytest runs tests/contract on one rank of this MPI")
    else:
        run_suite(ranks, "tests/contract")


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
