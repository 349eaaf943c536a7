"""Waits leave the core to the training, also where each look at the network is dear."""

from __future__ import annotations

import subprocess

import pytest

from tests.core.build import ROOT, build, native_compiler

pytestmark = [pytest.mark.serial, pytest.mark.gate]


def test_a_wait_of_slow_turns_soon_naps_and_ever_longer(tmp_path):
    program = tmp_path / "patience"
    sources = [ROOT / "csrc" / "transport" / "transport.cc", ROOT / "tests" / "core/patience.cc"]
    build(program, native_compiler(), ["-O2"], sources)
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60)
    waits = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(waits) == 3
    for turns, *naps in waits:
        # A nap does not come at once; by time, not by turns, it comes after a tenth of these.
        assert 1 <= turns < 100
        assert naps == sorted(naps)
        assert 50_000 <= naps[0] < 100_000
        assert 1_000_000 < naps[-1] < 3_000_000
