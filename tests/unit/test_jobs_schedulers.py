"""Parsers of Slurm and PBS, on recorded answers of real schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import JobState as S
from qsgd_hpc.jobs.schedulers import pbs, slurm
from qsgd_hpc.jobs.schedulers.command import HUNG, Answer, UnconfirmedError, ask, refusal

FIXTURES = Path(__file__).parent.parent / "fixtures"


def recorded(system: str, name: str) -> Answer:
    """Return a recorded answer."""
    base = FIXTURES / system
    out, err, code = ((base / f"{name}.{part}").read_text("utf-8") for part in ("out", "err", "rc"))
    return Answer(out, err, int(code))


def names(system: str, prefix: str) -> list[str]:
    return sorted(p.stem for p in (FIXTURES / system).glob(f"{prefix}*.out"))


@pytest.mark.parametrize(
    ("name", "job", "state", "exit_code", "why"),
    [
        ("queued", "14", S.QUEUED, None, "Not enough total nodes"),
        ("held", "13", S.QUEUED, None, "held"),
        ("depheld", "12", S.QUEUED, None, "waits for afterok:11."),
        ("running", "8", S.RUNNING, None, ""),
        ("rerun", "8", S.RUNNING, None, ""),
        ("failed", "10", S.FAILED, 3, "exit code 3"),
        ("walltime", "11", S.TIMEOUT, None, "exceeded resource walltime"),
        ("cancelled_running", "9", S.CANCELLED, None, "terminated by me"),
        ("cancelled_queued", "14", S.CANCELLED, None, "Can Never Run"),
        ("dep_failed", "12", S.FAILED, None, "never ran"),
        ("array", "15[]", S.COMPLETED, 0, ""),
        ("array", "15[0]", S.COMPLETED, 0, ""),
        ("mixed_unknown", "8", S.RUNNING, None, ""),
    ],
)
def test_qstat_answers_are_understood(
    name: str, job: str, state: S, exit_code: int | None, why: str
) -> None:
    progress = pbs.parse_qstat(recorded("pbs", name))[f"{job}.polaris-login-bed"]
    assert (progress.state, progress.exit_code) == (state, exit_code)
    assert why in progress.why


def test_a_job_that_pbs_does_not_know_is_named_beside_valid_answers() -> None:
    mixed = pbs.parse_qstat(recorded("pbs", "mixed_unknown"))
    assert mixed.unknown == {"99999.polaris-login-bed"}
    vanished = pbs.parse_qstat(recorded("pbs", "vanished"))
    assert not vanished
    assert vanished.unknown == {(FIXTURES / "pbs/vanished.id").read_text().strip()}


def test_a_finished_job_asked_without_history_is_not_unknown() -> None:
    shown = pbs.parse_qstat(recorded("pbs", "finished_no_x"))
    assert not shown
    assert not shown.unknown


def test_garbage_from_qstat_is_no_answer() -> None:
    assert pbs.parse_qstat(Answer("qstat: cannot connect to server", "", 1)) == {}


def test_qsub_id_is_read() -> None:
    assert pbs.parse_qsub(recorded("pbs", "qsub_ok")) == "0.polaris-login-bed"
    assert pbs.parse_qsub(Answer("Project balance: 12.5 hours\n77.server\n")) == "77.server"


@pytest.mark.parametrize("name", [n for n in names("pbs", "qsub_") if n != "qsub_ok"])
def test_refusals_of_qsub_are_quoted(name: str) -> None:
    answer = recorded("pbs", name)
    assert pbs.parse_qsub(answer) is None
    text = str(refusal("qsub", answer, pbs.REMEDIES))
    assert answer.err.strip() in text
    assert len(text.splitlines()) == (1 if name == "qsub_noscript" else 2)


@pytest.mark.parametrize(
    ("name", "job", "state", "why"),
    [
        ("squeue_running", "4", S.RUNNING, ""),
        ("squeue_dep", "8", S.QUEUED, "Dependency"),
        ("squeue_depnever", "8", S.QUEUED, "it will never start; cancel it"),
        ("squeue_held", "10", S.QUEUED, "JobHeldUser"),
        ("squeue_reqnodenotavail", "12", S.QUEUED, "ReqNodeNotAvail, UnavailableNodes:nid0008"),
        ("squeue_resources", "13", S.QUEUED, "Nodes required for job are DOWN"),
        ("squeue_requeued", "4", S.QUEUED, "BeginTime"),
    ],
)
def test_squeue_answers_are_understood(name: str, job: str, state: S, why: str) -> None:
    answer = slurm.parse_squeue(recorded("slurm", name))
    assert answer is not None
    assert answer[job].state is state
    assert why in answer[job].why


@pytest.mark.parametrize("name", ["squeue_unknown", "squeue_array", "squeue_failed"])
def test_forgotten_jobs_are_absent_from_squeue(name: str) -> None:
    assert slurm.parse_squeue(recorded("slurm", name)) == {}


def test_a_scheduler_that_is_down_gives_no_answer() -> None:
    down = Answer("", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    assert slurm.parse_squeue(down) is None
    assert slurm.parse_sacct(down) is None


@pytest.mark.parametrize(
    ("name", "job", "state", "exit_code", "why"),
    [
        ("sacct_array", "11_2", S.COMPLETED, 0, ""),
        ("sacct_cancelled_queued", "13", S.CANCELLED, None, "CANCELLED by 0"),
        ("sacct_cancelled_running", "5", S.CANCELLED, None, "CANCELLED by 0"),
        ("sacct_depkilled", "9", S.CANCELLED, None, "CANCELLED"),
        ("sacct_dep", "8", S.QUEUED, None, "Dependency"),
        ("sacct_held", "10", S.QUEUED, None, "JobHeldUser"),
        ("sacct_failed", "6", S.FAILED, 3, "exit code 3"),
        ("sacct_reqnodenotavail", "12", S.QUEUED, None, "ReqNodeNotAvail"),
        ("sacct_requeued", "4", S.QUEUED, None, ""),
        ("sacct_requeued_D", "4", S.QUEUED, None, ""),
        ("sacct_resources", "13", S.QUEUED, None, "ReqNodeNotAvail"),
        ("sacct_running", "4", S.RUNNING, None, ""),
        ("sacct_timeout", "7", S.TIMEOUT, None, "TIMEOUT"),
    ],
)
def test_sacct_answers_are_understood(
    name: str, job: str, state: S, exit_code: int | None, why: str
) -> None:
    answer = slurm.parse_sacct(recorded("slurm", name))
    assert answer is not None
    assert (answer[job].state, answer[job].exit_code) == (state, exit_code)
    assert why in answer[job].why


def test_sacct_knows_when_a_job_ran() -> None:
    answer = slurm.parse_sacct(recorded("slurm", "sacct_array"))
    assert answer is not None
    started, ended = answer["11_0"].started_at, answer["11_0"].ended_at
    assert started is not None
    assert ended == started + 1


def test_slurm_without_accounting_has_forgotten_instead_of_being_down() -> None:
    assert slurm.parse_sacct(Answer("", "Slurm accounting storage is disabled", 1)) == {}


def test_sbatch_id_is_read() -> None:
    assert slurm.parse_sbatch(recorded("slurm", "sbatch_ok")) == "1"
    assert slurm.parse_sbatch(Answer("42;cluster\n")) == "42"


@pytest.mark.parametrize("name", [n for n in names("slurm", "sbatch_") if n != "sbatch_ok"])
def test_refusals_of_sbatch_are_quoted(name: str) -> None:
    answer = recorded("slurm", name)
    assert slurm.parse_sbatch(answer) is None
    text = str(refusal("sbatch", answer, slurm.REMEDIES))
    assert answer.err.strip().splitlines()[-1] in text
    assert len(text.splitlines()) == (1 if name == "sbatch_noscript" else 2)


def test_every_recorded_answer_is_covered() -> None:
    for name in names("slurm", "sacct_"):
        assert slurm.parse_sacct(recorded("slurm", name)) is not None
    for name in names("slurm", "squeue_"):
        assert slurm.parse_squeue(recorded("slurm", name)) is not None


def test_a_command_that_is_missing_is_an_answer() -> None:
    assert ask(["no-such-command-here"]).code == 127


def test_a_hanging_submission_is_not_called_refused() -> None:
    error = refusal("sbatch", Answer("", "sbatch: no answer within 60 s", HUNG), ())
    assert isinstance(error, UnconfirmedError)
    assert isinstance(error, LaunchError)
