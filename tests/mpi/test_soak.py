"""A short form of ``make soak``: random collectives on four ranks."""

from __future__ import annotations

import os
from pathlib import Path

SOAK = Path(__file__).parents[1] / "soak" / "soak.py"
SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))


def test_random_collectives_are_right_and_leave_no_memory_behind(run_ranks, python):
    done = run_ranks(4, python, str(SOAK), "--seconds", str(SECONDS), timeout_s=SECONDS + 240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "rounds right" in done.stdout
    assert done.stdout.count("since it was warm") == 4
