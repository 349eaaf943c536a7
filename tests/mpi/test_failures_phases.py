"""A rank that dies, raises, leaves or stops, in any phase of a job: all others end and say why."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("struck_rank.py"))
RANKS = 2
ENDED_WITHIN_S = 120
# `make soak` strikes in every phase, under every MPI, and stops for a minute.
ALL = "STOP_SECONDS" in os.environ
pytestmark = [] if ALL else [pytest.mark.one_mpi]
STOP_S = os.environ.get("STOP_SECONDS", "2")
AT_ONCE = 2
BEFORE = ["before_import", "before_init"]
TRAINING = ["before_first", "forward", "backward", "step"]
COLLECTIVES = [
    "allreduce", "coded allreduce", "grouped allreduce", "broadcast", "allgather", "alltoall",
    "reducescatter", "barrier",
]  # fmt: skip


def some(phases: list[str], *chosen: str) -> list[str]:
    """Return the phases of the everyday tests, or all of them."""
    return phases if ALL else list(chosen)


@pytest.fixture
def strike_all(run_ranks, python):
    """Return run(action, phases): each phase's finished process, and seconds after the strike."""

    def strike(action: str, phase: str, victim: int):
        done = run_ranks(RANKS, python, SCRIPT, phase, action, str(victim), STOP_S)
        ended = time.time()
        struck = re.search(r"struck at ([\d.]+)", done.stdout)
        assert struck, f"{phase}: never struck\n{done.stdout}{done.stderr}"
        return done, ended - float(struck[1])

    def run(action: str, phases: list[str], victim: int):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = pool.map(lambda p: strike(action, p, victim), phases)
            yield from zip(phases, ended, strict=True)

    return run


@pytest.mark.parametrize("victim", [1, 0])
def test_a_kill_in_any_phase_ends_all_and_names_the_rank(strike_all, victim):
    phases = some([*BEFORE, *TRAINING, *COLLECTIVES], "before_init", "backward", "alltoall")
    for phase, (done, seconds) in strike_all("kill", phases, victim):
        assert done.returncode == 128 + 9, (phase, done.stderr)
        assert f"rank {victim}" in done.stderr.splitlines()[-1], (phase, done.stderr)
        assert "SIGKILL" in done.stderr, (phase, done.stderr)
        assert seconds < ENDED_WITHIN_S, phase
        if phase not in BEFORE:
            told = [line for line in done.stderr.splitlines() if "RankFailedError" in line]
            assert told and all(f"rank {victim}" in line for line in told), (phase, done.stderr)


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.gate), 0])
def test_a_kill_in_shutdown_ends_all(strike_all, victim):
    for _, (done, seconds) in strike_all("kill", ["shutdown"], victim):
        assert done.returncode == 128 + 9, done.stderr
        assert f"rank {victim}" in done.stderr.splitlines()[-1], done.stderr
        assert seconds < ENDED_WITHIN_S


@pytest.mark.parametrize("victim", [1, 0])
def test_an_exception_in_any_phase_ends_all_with_its_text(strike_all, victim):
    phases = [*BEFORE, *TRAINING, *COLLECTIVES, "shutdown"]
    phases = some(phases, "before_init", "forward", "grouped allreduce")
    for phase, (done, seconds) in strike_all("raise", phases, victim):
        assert done.returncode == 1, (phase, done.stderr)
        assert f"ValueError: struck in {phase}" in done.stderr, phase
        assert seconds < ENDED_WITHIN_S, phase
        if phase in (*TRAINING, *COLLECTIVES):
            reason = f"rank {victim} left the job (it ended with ValueError: struck in {phase})"
            assert reason in done.stderr, (phase, done.stderr)


@pytest.mark.parametrize("victim", [1, 0])
def test_an_early_exit_in_any_phase_ends_all_and_names_the_rank(strike_all, victim):
    phases = some([*TRAINING, *COLLECTIVES], "backward", "barrier")
    for phase, (done, seconds) in strike_all("exit", phases, victim):
        assert done.returncode != 0, (phase, done.stderr)
        reason = f"rank {victim} left the job (its script ended)"
        assert reason in done.stderr, (phase, done.stderr)
        assert seconds < ENDED_WITHIN_S, phase


@pytest.mark.parametrize("victim", [1, 0])
def test_a_stop_in_any_phase_only_delays_the_job(strike_all, victim):
    phases = some([*BEFORE, *TRAINING, *COLLECTIVES, "shutdown"], "backward", "allgather")
    for phase, (done, _) in strike_all("stop", phases, victim):
        assert done.returncode == 0, (phase, done.stderr)
        assert done.stdout.count("finished") == RANKS, (phase, done.stdout, done.stderr)
