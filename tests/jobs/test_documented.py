"""Cobalt and LSF, on answers as their documentation shows them: none was recorded."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.current import refreshed
from qsgd_hpc.jobs.model import Job, JobRequest, Progress
from qsgd_hpc.jobs.model import JobState as S
from qsgd_hpc.jobs.schedulers import Dependency, cobalt, lsf, scheduler
from qsgd_hpc.jobs.schedulers.common import Answer
from qsgd_hpc.launch.schedulers import SCHEDULERS
from tests.jobs.fake_schedulers import Fakes

QSTAT = """JobID: 77734
    JobName           : train
    User              : me
    WallTime          : 06:00:00
    State             : {state}
    Location          : None
    Queue             : full-node
    OutputPath        : {log}
    Envs              : A=1:B=2

JobID: 77735
    State             : queued
"""
LOG = (
    "Thu Nov 05 17:29:30 2020 +0000 (UTC) Info: task completed normally with an exit code of {}; "
    "initiating job cleanup and removal\n"
)
KILLED = "Thu Nov 05 17:29:30 2020 +0000 (UTC) Info: maximum execution time exceeded; initiating\n"
DELETED = "Thu Nov 05 17:29:30 2020 +0000 (UTC) Info: user delete requested with signal SIGTERM\n"


def job_in(folder: Path, name: str, scheduler_id: str | None = None, array: bool = False) -> Job:
    """Return a job that was submitted long ago."""
    folder.mkdir(exist_ok=True)
    (folder / "script.sh").write_text("#!/bin/bash\n#BSUB -J train\n")
    values = {"lr": ("0.1", "0.2")} if array else {}
    asked = JobRequest(Path("train.py"), array=values, workdir=folder)
    return Job("s-1", "s", name, asked, folder, 0.0, Progress(scheduler_id=scheduler_id))


def bjobs(**fields: str) -> str:
    """Return what bjobs prints of one job."""
    empty = dict.fromkeys(["JOBINDEX", "EXIT_CODE", "EXIT_REASON", "PEND_REASON"], "")
    record = {"JOBID": "42", **empty, "START_TIME": "-", "FINISH_TIME": "-", **fields}
    return json.dumps({"COMMAND": "bjobs", "JOBS": 1, "RECORDS": [record]})


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_offers_the_same(name: str) -> None:
    module = scheduler(name)
    assert all(callable(getattr(module, verb)) for verb in ("submit", "find", "refresh", "cancel"))


def test_a_cobalt_job_is_submitted_with_its_log_and_dependencies(
    fakes: Fakes, tmp_path: Path
) -> None:
    job = job_in(tmp_path / "j", "cobalt")
    fakes.says("qsub", 'Job routed to queue "full-node".\n77734\n')
    after = (Dependency("ok", "1"), Dependency("ok", "2"))
    assert cobalt.submit(job, after).scheduler_id == "77734"
    log = str(job.log_path)
    debug = f"{job.directory}/cobalt.log"
    assert fakes.args("qsub") == (
        "-o", log, "-e", log, "--debuglog", debug, "--dependencies", "1:2", str(job.script_path),
    )  # fmt: skip


@pytest.mark.parametrize("array", [True, False])
def test_what_cobalt_does_not_have_is_refused_here(tmp_path: Path, array: bool) -> None:
    job = job_in(tmp_path / "j", "cobalt", array=array)
    with pytest.raises(LaunchError, match="Cobalt"):
        cobalt.submit(job, (Dependency("any", "1"),))


@pytest.mark.parametrize(
    ("word", "state", "why"),
    [
        ("queued", S.QUEUED, ""),
        ("user_hold", S.QUEUED, "held by its user"),
        ("dep_fail", S.QUEUED, "it will never start; cancel it"),
        ("running", S.RUNNING, ""),
        ("killing", S.RUNNING, ""),
        ("levitating", S.QUEUED, ""),
    ],
)
def test_a_live_cobalt_job_is_followed(
    fakes: Fakes, tmp_path: Path, word: str, state: S, why: str
) -> None:
    job = job_in(tmp_path / "j", "cobalt", "77734")
    fakes.says("qstat", QSTAT.format(state=word, log="x"))
    new = cobalt.refresh([job])[job.id]
    assert new.state is state
    assert why in new.why


@pytest.mark.parametrize(
    ("log", "state", "exit_code", "why"),
    [
        (LOG.format(0), S.COMPLETED, 0, ""),
        (LOG.format(3), S.FAILED, 3, "exit code 3"),
        (LOG.format(85), S.FAILED, 85, "asks to be submitted again"),
        (KILLED + LOG.format(143), S.TIMEOUT, None, "walltime"),
        (DELETED + LOG.format(143), S.CANCELLED, None, "cancelled"),
        ("", S.LOST, None, "does not contain its end"),
    ],
)
def test_the_end_of_a_cobalt_job_is_in_its_log(
    fakes: Fakes, tmp_path: Path, log: str, state: S, exit_code: int | None, why: str
) -> None:
    job = job_in(tmp_path / "j", "cobalt", "77733")
    (job.directory / "cobalt.log").write_text(log)
    fakes.says("qstat", rc=1)
    new = cobalt.refresh([job])[job.id]
    assert (new.state, new.exit_code) == (state, exit_code)
    assert why in new.why


def test_an_unconfirmed_cobalt_job_is_found_by_its_output(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "cobalt")
    fakes.says("qstat", QSTAT.format(state="running", log=job.log_path))
    assert cobalt.find(job) == "77734"
    assert cobalt.refresh([job])[job.id].scheduler_id == "77734"
    fakes.says("qstat", QSTAT.format(state="running", log="/elsewhere"))
    assert cobalt.refresh([job])[job.id].state is S.LOST


def test_a_silent_cobalt_changes_nothing(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "cobalt", "77734")
    fakes.says("qstat", err="Failed to connect to queue-manager", rc=1)
    new = cobalt.refresh([job])[job.id]
    assert new.state is S.QUEUED
    assert new.silence.startswith("Cobalt does not answer: Failed to connect")
    with pytest.raises(LaunchError, match="did not end"):
        cobalt.cancel(job)


def test_cancelling_a_cobalt_job_that_is_gone_is_no_error(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "cobalt", "77733")
    fakes.says("qdel", err="no such job", rc=1)
    fakes.says("qstat", QSTAT.format(state="running", log="x"))
    cobalt.cancel(job)
    assert fakes.args("qdel") == ("77733",)


def test_an_lsf_job_is_read_from_standard_input(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "lsf")
    fakes.says("bsub", "Job <42> is submitted to queue <batch>.\n")
    after = (Dependency("ok", "1"), Dependency("any", "2"))
    assert lsf.submit(job, after).scheduler_id == "42"
    assert fakes.args("bsub") == ("-o", str(job.log_path), "-w", "done(1) && ended(2)", "-ti")
    assert fakes.stdin("bsub") == job.script_path.read_text()
    lsf.submit(job_in(tmp_path / "j", "lsf", array=True))
    assert fakes.args("bsub") == ("-o", f"{job.directory}/output-%I.log")


@pytest.mark.parametrize(
    ("fields", "state", "exit_code", "why"),
    [
        ({"STAT": "PEND", "PEND_REASON": "Not enough hosts"}, S.QUEUED, None, "Not enough hosts"),
        ({"STAT": "PEND", "PEND_REASON": "Dependency condition never satisfied;"}, S.QUEUED, None,
         "It will never start"),
        ({"STAT": "PSUSP"}, S.QUEUED, None, "`bresume`"),
        ({"STAT": "RUN"}, S.RUNNING, None, ""),
        ({"STAT": "UNKWN"}, S.RUNNING, None, "lost contact"),
        ({"STAT": "DONE"}, S.COMPLETED, 0, ""),
        ({"STAT": "EXIT", "EXIT_CODE": "3"}, S.FAILED, 3, "exit code 3"),
        ({"STAT": "EXIT", "EXIT_CODE": "85"}, S.FAILED, 85, "asks to be submitted again"),
        ({"STAT": "EXIT", "EXIT_CODE": "140", "EXIT_REASON": "TERM_RUNLIMIT: job killed after"},
         S.TIMEOUT, None, "walltime"),
        ({"STAT": "EXIT", "EXIT_REASON": "TERM_OWNER: job killed by owner"}, S.CANCELLED, None,
         "cancelled"),
        ({"STAT": "EXIT", "EXIT_REASON": "TERM_ORPHAN_SYSTEM: orphan job"}, S.CANCELLED, None,
         "waited for did not complete"),
        ({"STAT": "EXIT", "EXIT_CODE": "137", "EXIT_REASON": "TERM_MEMLIMIT: job killed"},
         S.FAILED, None, "ran out of memory"),
        ({"STAT": "ZOMBI", "EXEC_HOST": "42*n7"}, S.NODE_FAIL, None, "node n7 failed"),
        ({"STAT": "ZOMBI", "EXEC_HOST": "42*n7:42*n8"}, S.NODE_FAIL, None, "a node of the job"),
        ({"STAT": "EXIT"}, S.FAILED, None, "without a reason"),
    ],
)  # fmt: skip
def test_states_of_lsf_jobs_are_told_apart(
    fakes: Fakes, tmp_path: Path, fields: dict[str, str], state: S, exit_code: int | None, why: str
) -> None:
    job = job_in(tmp_path / "j", "lsf", "42")
    fakes.says("bjobs", bjobs(**fields))
    new = lsf.refresh([job])[job.id]
    assert (new.state, new.exit_code) == (state, exit_code)
    assert why in new.why
    assert len(fakes.calls()) == 1


def test_an_lsf_array_counts_from_one(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "lsf", "42", array=True)
    shown = (bjobs(STAT="DONE", JOBINDEX="1"), bjobs(STAT="EXIT", EXIT_CODE="3", JOBINDEX="2"))
    records = [record for text in shown for record in json.loads(text)["RECORDS"]]
    fakes.says("bjobs", json.dumps({"RECORDS": records}))
    new = lsf.refresh([job])[job.id]
    assert new.why == "1 of 2 tasks completed, task 1 FAILED (exit code 3)"
    assert job.task_log_path(0).name == "output-1.log"


def test_lsf_times_are_the_last_that_were_so() -> None:
    now = time.mktime(time.strptime("2026-01-02 10:00", "%Y-%m-%d %H:%M"))
    shown = [lsf.time_of(text, now) for text in ("Jan  2 09:30", "Dec 31 23:00 L", "-", "")]
    expected = [
        time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))
        for text in ("2026-01-02 09:30", "2025-12-31 23:00")
    ]
    assert shown == [*expected, None, None]


def test_an_unconfirmed_lsf_job_is_found_by_its_output(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "lsf")
    fakes.says("bjobs", bjobs(STAT="RUN", OUTPUT_FILE=str(job.log_path)))
    assert lsf.find(job) == "42"
    assert lsf.refresh([job])[job.id].scheduler_id == "42"


def test_an_lsf_without_jobs_answers_and_one_that_is_down_does_not(
    fakes: Fakes, tmp_path: Path
) -> None:
    job = job_in(tmp_path / "j", "lsf", "42")
    fakes.says("bjobs", err="No job found", rc=255)
    assert lsf.refresh([job])[job.id].state is S.LOST
    fakes.says("bjobs", err="Cannot connect to LSF. Please wait ...", rc=255)
    assert lsf.refresh([job])[job.id].silence.startswith("LSF does not answer: Cannot connect")


def test_cancelling_an_lsf_job_that_is_over_is_no_error(fakes: Fakes, tmp_path: Path) -> None:
    job = job_in(tmp_path / "j", "lsf", "42")
    fakes.says("bkill", err="Job <42>: Job has already finished", rc=255)
    lsf.cancel(job)
    fakes.says("bkill", err="Cannot connect to LSF", rc=255)
    with pytest.raises(LaunchError, match="did not end"):
        lsf.cancel(job)


def test_jobs_that_have_ended_are_not_asked_for(fakes: Fakes, tmp_path: Path) -> None:
    for name in SCHEDULERS.keys() - {"local"}:
        job = job_in(tmp_path / "j", name, "42")
        over = dataclasses.replace(job, progress=Progress(S.COMPLETED, 0, scheduler_id="42"))
        assert refreshed([over]) == [over]
    assert fakes.calls() == []


WORDS = ("JobID: 7\n", "State : running\n", LOG.format(3), bjobs(STAT="EXIT"), "{", "Job <42> is")


@settings(max_examples=200, deadline=None)
@given(
    out=st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map("".join)),
    kept=st.integers(0, 400),
    err=st.text(),
    code=st.integers(-9, 255),
)
def test_no_answer_upsets_a_parser(out: str, kept: int, err: str, code: int) -> None:
    answer = Answer(out[:kept], err, code)
    cobalt.parse_qsub(answer)
    cobalt.parse_qstat(answer)
    cobalt.parse_log(answer.out)
    lsf.parse_bsub(answer)
    lsf.parse_bjobs(answer)
