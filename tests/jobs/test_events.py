"""What a job wrote itself, beside what its scheduler says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qsgd_hpc.jobs.events import NO_MEMORY, exit_words, read_events, with_own_record
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress

START = {"at": 100, "event": "start", "host": "nid1"}


def job(folder: Path, *events: object, scheduler: str = "slurm") -> Job:
    note(folder, *events)
    request = JobRequest(Path("train.py"), site="bed")
    return Job("bed-1", "bed", scheduler, request, folder, 90.0, Progress(JobState.RUNNING))


def note(folder: Path, *events: object) -> None:
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (folder / "events.jsonl").write_text(text)


def ended(code: int) -> dict[str, object]:
    return {"at": 200, "event": "end", "exit_code": code}


@pytest.mark.parametrize(
    ("code", "state"), [(0, JobState.COMPLETED), (3, JobState.FAILED), (85, JobState.STOPPED)]
)
def test_a_job_that_vanished_ended_as_it_noted(tmp_path: Path, code: int, state: JobState) -> None:
    found = with_own_record(job(tmp_path, START, ended(code)), Progress(JobState.LOST, why="gone"))
    assert (found.state, found.exit_code, found.ended_at) == (state, code, 200)


def test_a_job_that_vanished_without_a_note_of_its_end_is_lost(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START), Progress(JobState.LOST, why="gone"))
    assert found.state is JobState.LOST


def test_a_failure_without_exit_code_gets_the_jobs_own(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START, ended(85)), Progress(JobState.FAILED))
    assert (found.state, found.exit_code) == (JobState.STOPPED, 85)


def test_a_timeout_stays_one_whatever_the_script_noted(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START, ended(143)), Progress(JobState.TIMEOUT))
    assert (found.state, found.exit_code) == (JobState.TIMEOUT, None)


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        (241, JobState.FAILED, "exit code 241, though its scheduler reports exit code 0"),
        (85, JobState.STOPPED, "though its scheduler reports exit code 0"),
        (0, JobState.COMPLETED, ""),
    ],
)
def test_a_job_that_noted_a_failure_is_not_complete(
    tmp_path: Path, code: int, state: JobState, why: str
) -> None:
    found = with_own_record(job(tmp_path, START, ended(code)), Progress(JobState.COMPLETED, 0))
    assert (found.state, found.exit_code) == (state, code)
    assert why in found.why


def test_a_failure_that_only_the_scheduler_saw_stays_one(tmp_path: Path) -> None:
    told = Progress(JobState.FAILED, 1, "the script ended with exit code 1")
    found = with_own_record(job(tmp_path, START, ended(0)), told)
    assert (found.state, found.exit_code) == (JobState.FAILED, 1)
    assert found.why == f"{told.why}; the job itself recorded exit code 0"
    told = Progress(JobState.FAILED, None, NO_MEMORY)
    assert with_own_record(job(tmp_path, START, ended(0)), told).state is JobState.FAILED
    assert with_own_record(job(tmp_path, START, ended(1)), told).why == NO_MEMORY


def test_an_exit_code_that_sacct_prints_less_128_is_the_jobs_own(tmp_path: Path) -> None:
    told = Progress(JobState.FAILED, 11, "the script ended with exit code 11")
    found = with_own_record(job(tmp_path, START, ended(139)), told)
    assert (found.state, found.exit_code, found.why) == (JobState.FAILED, 139, "ended by SIGSEGV")


def test_a_checkpoint_is_one_although_a_signal_ended_what_was_around_the_script(
    tmp_path: Path,
) -> None:
    told = Progress(JobState.FAILED, 138, "ended by SIGUSR1")
    assert with_own_record(job(tmp_path, START, ended(85)), told).state is JobState.STOPPED


def test_what_an_earlier_run_noted_says_nothing_of_this_one(tmp_path: Path) -> None:
    told = Progress(JobState.COMPLETED, 0, started_at=300.0)
    assert with_own_record(job(tmp_path, START, ended(3)), told).state is JobState.COMPLETED


def test_an_array_with_a_task_that_noted_a_failure_is_not_complete(tmp_path: Path) -> None:
    array = job(tmp_path, scheduler="pbs")
    request = dataclasses.replace(array.request, array={"lr": ("1", "2", "3")})
    array = dataclasses.replace(array, request=request)
    for task, code in enumerate((0, 241, 0)):
        (tmp_path / f"task-{task}").mkdir()
        note(tmp_path / f"task-{task}", START, ended(code))
    found = with_own_record(array, Progress(JobState.COMPLETED, 0, tasks={"COMPLETED": 3}))
    assert (found.state, found.exit_code) == (JobState.FAILED, 241)
    assert dict(found.tasks) == {"COMPLETED": 2, "FAILED": 1}
    assert found.why == "task 1 recorded exit code 241, though its scheduler reports 0"


DIED = "=>> PBS: job killed: node 1 (x3002) requested job die, code 1099\n"
OLD_DIED = (
    "half a line=>> PBS: job killed: node 1 (x3002) requested job terminate, 'EOF' (code 1099) - "
    "received SISTER_EOF attempting to communicate with sister MOM's\nmpirun: killing job...\n"
)
OVER_LIMIT = "=>> PBS: job killed: node 1 (x3002) requested job die, code 1000\n"
TERMINATED = {"at": 150, "event": "terminate"}


FAILED = JobState.FAILED
LOSSES = {
    "signal": (DIED, Progress(FAILED, 143), (), JobState.NODE_FAIL),
    "torque": (OLD_DIED, Progress(FAILED, 137), (START,), JobState.NODE_FAIL),
    "no code": (DIED, Progress(FAILED, None), (START,), JobState.NODE_FAIL),
    "told to end": (DIED, Progress(FAILED, 1), (START, TERMINATED, ended(1)), JobState.NODE_FAIL),
    "called complete": (
        DIED, Progress(JobState.COMPLETED, 0), (START, TERMINATED, ended(241)), JobState.NODE_FAIL,
    ),
    "printed": (DIED, Progress(FAILED, 1), (START, ended(1)), FAILED),
    "complete": (DIED, Progress(JobState.COMPLETED, 0), (START, ended(0)), JobState.COMPLETED),
    "cancelled": (DIED, Progress(JobState.CANCELLED), (START, TERMINATED), JobState.CANCELLED),
    "limit": (OVER_LIMIT, Progress(FAILED, 143), (START, TERMINATED), FAILED),
    "no word": ("Terminated\n", Progress(FAILED, 143), (START, TERMINATED), FAILED),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_node_of_pbs_that_died_is_read_from_the_output(tmp_path: Path, loss: str) -> None:
    log, told, events, state = LOSSES[loss]
    ran = job(tmp_path, *events, scheduler="pbs")
    ran.log_path.write_text("x" * 100_000 + "\n" + log)
    found = with_own_record(ran, told)
    assert found.state is state
    lost = state is JobState.NODE_FAIL
    assert found.bad_nodes == (("x3002",) if lost else ())
    assert not lost or found.why == "node x3002 failed"


@pytest.mark.parametrize(
    ("first", "code", "why"),
    [
        ("Exited with exit code 3", 3, "rank 1 on nid1 ended with exit code 3; see the log"),
        ("Terminated", 143, "ended by SIGTERM"),
    ],
)
def test_a_rank_for_which_srun_ended_the_others_is_read_from_the_output(
    tmp_path: Path, first: str, code: int, why: str
) -> None:
    lost = job(tmp_path, START, ended(143))
    lost.log_path.write_text(
        f"1: ValueError: bad data\nsrun: error: nid1: task 1: {first}\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: nid1: task 0: Terminated\nsrun: error: nid2: tasks 2-3: Terminated\n"
    )
    found = with_own_record(lost, Progress(JobState.FAILED, 15, exit_words(15)))
    assert (found.state, found.exit_code, found.why) == (JobState.FAILED, code, why)


def test_the_end_of_an_earlier_run_does_not_end_a_job_that_runs_again(tmp_path: Path) -> None:
    again = {**START, "at": 300}
    old = Progress(JobState.FAILED, 85, ended_at=200.0)
    found = with_own_record(job(tmp_path, START, {"at": 200, "event": "requeue"}, again), old)
    assert found.state is JobState.RUNNING
    new = Progress(JobState.COMPLETED, 0, ended_at=310.0)
    found = with_own_record(job(tmp_path, START, {"at": 200, "event": "requeue"}, again), new)
    assert (found.state, found.restarts) == (JobState.COMPLETED, 1)


def test_a_requeued_job_has_not_started(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START), Progress(JobState.QUEUED))
    assert (found.state, found.started_at) == (JobState.QUEUED, None)


@pytest.mark.parametrize(
    ("events", "ended_at"),
    [((START,), 97.0), ((START, ended(2)), 97.0), ((START, ended(2)), -900.0)],
    ids=["killed", "apart", "far apart"],
)
def test_a_short_job_has_ended_although_the_clock_of_its_node_is_ahead(
    tmp_path: Path, events: tuple[object, ...], ended_at: float
) -> None:
    told = Progress(JobState.FAILED, 2, ended_at=ended_at)
    assert with_own_record(job(tmp_path, *events), told).state is JobState.FAILED


def test_a_part_of_a_chain_with_nothing_to_do_says_so(tmp_path: Path) -> None:
    skip = {"at": 101, "event": "skip"}
    found = with_own_record(job(tmp_path, START, skip, ended(0)), Progress(JobState.COMPLETED, 0))
    assert "nothing was left to do" in found.why


def test_a_line_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f'{json.dumps(START)}\n[1]\n{{"at": 1, "ev')
    assert read_events(tmp_path) == [START]
