"""What each recorded answer of a real scheduler means: every fixture has its line here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qsgd_hpc.jobs.events import WALLTIME
from qsgd_hpc.jobs.model import JobState as S
from qsgd_hpc.jobs.model import Progress
from qsgd_hpc.jobs.schedulers import pbs, slurm
from qsgd_hpc.jobs.schedulers.common import Answer, UnconfirmedError, refusal
from qsgd_hpc.jobs.schedulers.pbs import array_progress, parse_qstat
from qsgd_hpc.jobs.schedulers.slurm_answers import parse_sacct, parse_squeue
from tests.jobs.fake_schedulers import recorded, recorded_names

SERVER = "polaris-login-bed"


@dataclasses.dataclass(frozen=True)
class Says:
    """What is understood about one job; ``why`` is part of the reason, "" stands for none."""

    job: str
    state: S
    why: str = ""
    exit_code: int | None = None
    restarts: int = 0


NOTHING: tuple[Says, ...] = ()
QUEUED, RUNNING, DONE = S.QUEUED, S.RUNNING, S.COMPLETED

QSTAT = {
    "array": tuple(Says(f"15[{i}].{SERVER}", DONE, exit_code=0) for i in ("", "0", "1", "2")),
    "cancelled_queued": (Says(f"14.{SERVER}", S.CANCELLED, "Can Never Run"),),
    "cancelled_running": (Says(f"9.{SERVER}", S.CANCELLED, "terminated by me"),),
    "dep_failed": (Says(f"12.{SERVER}", S.CANCELLED, "a job that it waited for did not complete"),),
    "depheld": (Says(f"12.{SERVER}", QUEUED, "waits for other jobs to end (afterok:11."),),
    "failed": (Says(f"10.{SERVER}", S.FAILED, "exit code 3", 3),),
    "finished_no_x": NOTHING,
    "held": (Says(f"13.{SERVER}", QUEUED, "held by its user; release it with `qrls`"),),
    "mixed_unknown": (Says(f"8.{SERVER}", RUNNING),),
    "pbsnodes": NOTHING,
    "qstat_B": NOTHING,
    "qstat_Q": NOTHING,
    "qstat_number": (Says("53.testpbs", DONE, exit_code=0),),
    "qstat_one_of_two": (Says("53.testpbs", DONE, exit_code=0),),
    "queued": (Says(f"14.{SERVER}", QUEUED, "Not enough total nodes"),),
    "rerun": (Says(f"8.{SERVER}", RUNNING, restarts=1),),
    "running": (Says(f"8.{SERVER}", RUNNING),),
    "server_down": NOTHING,
    "vanished": NOTHING,
    "walltime": (Says(f"11.{SERVER}", S.TIMEOUT, WALLTIME),),
}
UNKNOWN = {"mixed_unknown": {f"99999.{SERVER}"}, "vanished": {f"7.{SERVER}"}}
SQUEUE: dict[str, tuple[Says, ...] | None] = {
    "squeue_array": NOTHING,
    "squeue_cluster": (Says("1;gpu", RUNNING),),
    "squeue_cluster_down": None,
    "squeue_cluster_unknown": NOTHING,
    "squeue_clusters": (Says("1;bed", RUNNING), Says("1;gpu", RUNNING)),
    "squeue_dep": (Says("8", QUEUED, "waits for other jobs to end (Dependency)"),),
    "squeue_depnever": (Says("8", QUEUED, "it will never start; cancel it"),),
    "squeue_failed": NOTHING,
    "squeue_held": (Says("10", QUEUED, "held by its user; release it with `scontrol release`"),),
    "squeue_reqnodenotavail": (Says("12", QUEUED, "not available: nid0008"),),
    "squeue_requeued": (Says("4", QUEUED, "a requeued job waits two minutes (BeginTime)"),),
    "squeue_resources": (Says("13", QUEUED, "Nodes required for job are DOWN, DRAINED"),),
    "squeue_running": (Says("4", RUNNING),),
    "squeue_unknown": NOTHING,
    "sinfo": None,
    "scontrol_part": None,
    "sacctmgr_assoc": None,
    "sacctmgr_qos": None,
}
SQUEUE_JSON = (
    "squeue_json_array",
    "squeue_json_dep",
    "squeue_json_failed",
    "squeue_json_held",
    "squeue_json_reqnodenotavail",
    "squeue_json_resources",
    "squeue_json_running",
)
SACCT = {
    "sacct_array": tuple(Says(f"11_{i}", DONE, exit_code=0) for i in range(3)),
    "sacct_cancelled_queued": (Says("13", S.CANCELLED, "by user 0"),),
    "sacct_cancelled_running": (Says("5", S.CANCELLED, "by user 0"),),
    "sacct_dep": (Says("8", QUEUED, "waits for other jobs to end (Dependency)"),),
    "sacct_depkilled": (Says("9", S.CANCELLED, "a job that it waited for did not complete"),),
    "sacct_failed": (Says("6", S.FAILED, "exit code 3", 3),),
    "sacct_held": (Says("10", QUEUED, "held by its user"),),
    "sacct_reqnodenotavail": (Says("12", QUEUED, "Slurm names none (ReqNodeNotAvail)"),),
    "sacct_requeued": (Says("4", QUEUED),),
    "sacct_requeued_D": (Says("4", QUEUED, restarts=1),),
    "sacct_resources": (Says("13", QUEUED, "Slurm names none (ReqNodeNotAvail)"),),
    "sacct_running": (Says("4", RUNNING),),
    "sacct_timeout": (Says("7", S.TIMEOUT, WALLTIME),),
    "sacct_unknown": NOTHING,
}
# Part of the remedy that is told with the refusal; "" where the message says it all.
QSUB = {
    "qsub_bad_fs": "`qstat -Bf`",
    "qsub_badres": "directive of the site's profile",
    "qsub_limits": "outside the queue's range",
    "qsub_maxqueued": "Wait until one of your jobs there has ended",
    "qsub_no_account": "--account PROJECT",
    "qsub_no_fs": "--filesystems",
    "qsub_noqueue": "`qstat -Q`",
    "qsub_noscript": "",
    "qsub_route_direct": "queue that routes to it",
}
SBATCH = {
    "sbatch_badfeature": "`sinfo -o %f`",
    "sbatch_badgpu": "fewer --nodes or --ranks-per-node",
    "sbatch_badtime": "--walltime such as",
    "sbatch_cluster_down": "down, or there is no cluster of that name; nothing was submitted",
    "sbatch_noaccount": "--account with one of your projects",
    "sbatch_nopart": "partition that `sinfo` lists",
    "sbatch_noqos": "QOS that is available to the account",
    "sbatch_noscript": "",
    "sbatch_qoswall": "shorter --walltime",
    "sbatch_toolong": "shorter --walltime",
    "sbatch_toomany": "fewer --nodes",
}
# Those that are tested beside what they are answers to, in test_jobs_batch.py.
SUBMITTED = {"qsub_ok": f"0.{SERVER}", "sbatch_ok": "1", "sbatch_cluster": "1;gpu"}
CANCELLED = (
    "scancel_cluster_down",
    "qdel_finished",
    "qdel_ok",
    "qdel_unknown",
    "scancel_done",
    "scancel_unknown",
)


def as_said(shown: dict[str, Progress], expected: tuple[Says, ...]) -> list[Says]:
    """Return what was understood, with the part of each reason that is expected."""
    reasons = {says.job: says.why for says in expected}
    return [
        Says(
            job,
            progress.state,
            reasons[job] if reasons.get(job) and reasons[job] in progress.why else progress.why,
            progress.exit_code,
            progress.restarts,
        )
        for job, progress in shown.items()
    ]


@pytest.mark.parametrize("name", QSTAT)
def test_qstat_answers_are_understood(name: str) -> None:
    shown = parse_qstat(recorded(f"pbs/{name}"))
    assert as_said(shown, QSTAT[name]) == list(QSTAT[name])
    assert (shown.silence is not None) == (name == "server_down")
    assert shown.unknown == UNKNOWN.get(name, set())


@pytest.mark.parametrize("name", SQUEUE)
def test_squeue_answers_are_understood(name: str) -> None:
    shown, expected = parse_squeue(recorded(f"slurm/{name}")), SQUEUE[name]
    assert (shown is None) == (expected is None)
    if shown is not None and expected is not None:
        assert as_said(shown, expected) == list(expected)


@pytest.mark.parametrize("name", SACCT)
def test_sacct_answers_are_understood(name: str) -> None:
    shown = parse_sacct(recorded(f"slurm/{name}"))
    assert shown is not None
    assert as_said(shown, SACCT[name]) == list(SACCT[name])


@pytest.mark.parametrize("name", SQUEUE_JSON)
def test_slurm_tells_which_script_each_job_was_submitted_with(name: str) -> None:
    answer = recorded(f"slurm/{name}")
    commands = [Path(job["command"]) for job in json.loads(answer.out)["jobs"]]
    assert commands
    assert all(command.is_absolute() and command.suffix == ".sh" for command in commands)
    assert parse_squeue(answer) is None


@pytest.mark.parametrize("name", QSUB)
def test_refusals_of_qsub_are_quoted_with_the_remedy(name: str) -> None:
    answer = recorded(f"pbs/{name}")
    assert pbs.parse_qsub(answer) is None
    assert_quoted(answer, "qsub", pbs.REMEDIES, QSUB[name])


@pytest.mark.parametrize("name", SBATCH)
def test_refusals_of_sbatch_are_quoted_with_the_remedy(name: str) -> None:
    answer = recorded(f"slurm/{name}")
    assert slurm.parse_sbatch(answer) is None
    assert_quoted(answer, "sbatch", slurm.REMEDIES, SBATCH[name])


def test_a_node_that_slurm_does_not_know_is_answered_with_a_remedy() -> None:
    err = "sbatch: error: Batch job submission failed: Invalid node name specified\n"
    assert_quoted(Answer("", err, 1), "sbatch", slurm.REMEDIES, "`sinfo -N`")


def assert_quoted(
    answer: Answer, command: str, remedies: tuple[tuple[str, str], ...], remedy: str
) -> None:
    error = refusal(command, answer, remedies)
    assert not isinstance(error, UnconfirmedError)
    assert " ".join(answer.err.strip().splitlines()[-1].split()) in str(error)
    assert remedy in str(error)
    assert len(str(error).splitlines()) == (2 if remedy else 1)


def test_ids_of_accepted_jobs_are_read() -> None:
    assert pbs.parse_qsub(recorded("pbs/qsub_ok")) == SUBMITTED["qsub_ok"]
    for name in ("sbatch_ok", "sbatch_cluster"):
        assert slurm.parse_sbatch(recorded(f"slurm/{name}")) == SUBMITTED[name]


def test_every_recorded_answer_has_an_expectation() -> None:
    known = {f"pbs/{name}" for name in (*QSTAT, *QSUB)}
    known |= {f"slurm/{name}" for name in (*SQUEUE, *SQUEUE_JSON, *SACCT, *SBATCH)}
    known |= {f"{'pbs' if n[0] == 'q' else 'slurm'}/{n}" for n in (*SUBMITTED, *CANCELLED)}
    assert sorted(known) == sorted([*recorded_names("pbs"), *recorded_names("slurm")])


def test_an_array_of_pbs_is_the_sum_of_its_tasks() -> None:
    whole = array_progress(parse_qstat(recorded("pbs/array")), f"15[].{SERVER}")
    assert whole is not None
    assert (whole.state, whole.exit_code, whole.why) == (DONE, 0, "")
    assert whole.tasks == {"COMPLETED": 3}
    assert whole.started_at is not None
    assert whole.ended_at == whole.started_at + 2


def test_sacct_knows_when_a_job_ran() -> None:
    shown = parse_sacct(recorded("slurm/sacct_array"))
    assert shown is not None
    started, ended = shown["11_0"].started_at, shown["11_0"].ended_at
    assert started is not None
    assert ended == started + 1
