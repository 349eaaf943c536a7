"""How answers of schedulers are read beyond what was recorded, and that nothing upsets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import JobState as S
from qsgd_hpc.jobs.model import Progress
from qsgd_hpc.jobs.schedulers import pbs, slurm
from qsgd_hpc.jobs.schedulers.common import HUNG, Answer, UnconfirmedError, aggregate, ask, refusal
from qsgd_hpc.jobs.schedulers.pbs import array_progress, parse_qstat
from qsgd_hpc.jobs.schedulers.slurm_answers import hosts, parse_sacct, parse_squeue
from tests.jobs.fake_schedulers import FIXTURES

RECORDED = [path.read_text("utf-8") for path in sorted(FIXTURES.glob("*/*.out"))]
RECORDED = [text for text in RECORDED if 0 < len(text) < 20_000]
CHECKPOINT = "it stopped at a checkpoint and asks to be submitted again"


def sacct(state: str, code: str = "0:0", nodes: str = "nid0001", reason: str = "None") -> Progress:
    """Return what is understood of one line of sacct."""
    line = f"6|{state}|{code}|2026-11-21T13:30:12|2026-11-21T13:31:12|00:01:00|1|{nodes}|{reason}"
    shown = parse_sacct(Answer(line))
    assert shown is not None
    return shown["6"]


def qstat(**fields: Any) -> Progress:
    """Return what is understood of one job of qstat."""
    ended = {"job_state": "F", "substate": 93, "exec_host": "x1/0*64+x2/0*64+x3/0*64"}
    return parse_qstat(Answer(json.dumps({"Jobs": {"6.server": {**ended, **fields}}})))["6.server"]


@pytest.mark.parametrize(
    ("state", "code", "expected", "exit_code", "why"),
    [
        ("COMPLETED", "0:0", S.COMPLETED, 0, ""),
        ("FAILED", "85:0", S.FAILED, 85, CHECKPOINT),
        ("FAILED", "0:9", S.FAILED, 137, "ended by SIGKILL"),
        ("FAILED", "139:0", S.FAILED, 139, "ended by SIGSEGV"),
        ("FAILED", "0:0", S.FAILED, None, "without an exit code"),
        ("FAILED", "0:53", S.FAILED, None, "QSGD_HOME and --workdir must be on a file system"),
        ("OUT_OF_MEMORY", "0:125", S.FAILED, None, "fewer --ranks-per-node"),
        ("PREEMPTED", "0:0", S.FAILED, None, "--requeue"),
        ("NODE_FAIL", "0:0", S.NODE_FAIL, None, "node nid0001 failed"),
        ("BOOT_FAIL", "0:0", S.NODE_FAIL, None, "node nid0001 failed"),
        ("CANCELLED+", "0:0", S.CANCELLED, None, "CANCELLED"),
        ("COMPLETING", "0:0", S.RUNNING, None, ""),
    ],
)
def test_ends_of_slurm_jobs_are_told_apart(
    state: str, code: str, expected: S, exit_code: int | None, why: str
) -> None:
    progress = sacct(state, code)
    assert (progress.state, progress.exit_code) == (expected, exit_code)
    assert why in progress.why


def test_the_only_node_of_a_slurm_job_is_the_one_that_failed() -> None:
    assert sacct("NODE_FAIL").bad_nodes == ("nid0001",)
    assert sacct("NODE_FAIL", nodes="nid[0001-0002]").bad_nodes == ()
    assert sacct("FAILED", "1:0").bad_nodes == ()


@pytest.mark.parametrize(
    ("fields", "expected", "exit_code", "why"),
    [
        ({"Exit_status": 85}, S.FAILED, 85, CHECKPOINT),
        ({"Exit_status": 265}, S.FAILED, 137, "ended by SIGKILL"),
        ({"Exit_status": 137}, S.FAILED, 137, "ended by SIGKILL"),
        ({"Exit_status": 255}, S.FAILED, 255, "exit code 255"),
        ({"Exit_status": -27}, S.FAILED, None, "fewer --ranks-per-node"),
        ({"Exit_status": -29}, S.TIMEOUT, None, "walltime"),
        ({"Exit_status": -3, "comment": "no home"}, S.FAILED, None, "(Exit_status -3): no home"),
        ({"Exit_status": -20}, S.NODE_FAIL, None, "node x1 failed"),
        ({"Exit_status": -14}, S.NODE_FAIL, None, "a node of the job failed"),
        ({"substate": 92, "depend": "afterok:5.s"}, S.CANCELLED, None, "that it waited for did"),
        ({"substate": 92, "depend": "beforeok:7.s"}, S.CANCELLED, None, "it never ran"),
        ({"substate": 92, "comment": "no queue"}, S.CANCELLED, None, "no queue"),
        ({"stime": "Sat Nov 21 13:26:04 2026"}, S.FAILED, None, "without an exit code"),
        ({"job_state": "H", "Hold_Types": "so"}, S.QUEUED, None, "held by an operator and PBS"),
        ({"job_state": "S"}, S.RUNNING, None, "suspended"),
    ],
)
def test_states_of_pbs_jobs_are_told_apart(
    fields: dict[str, Any], expected: S, exit_code: int | None, why: str
) -> None:
    progress = qstat(**fields)
    assert (progress.state, progress.exit_code) == (expected, exit_code)
    assert why in progress.why


def test_a_failed_node_of_pbs_is_the_one_that_the_comment_names() -> None:
    placed = "Job run at Sat Nov 21 at 13:26 on (x1:ncpus=64)+(x2:ncpus=64)+(x3:ncpus=64)"
    assert qstat(Exit_status=-14, comment=f"{placed} and x2 went down").bad_nodes == ("x2",)
    assert qstat(Exit_status=-14, comment=placed).bad_nodes == ()
    assert qstat(Exit_status=-4, comment=placed).bad_nodes == ("x1",)
    assert qstat(Exit_status=-14, exec_host="x7/0*64+x7/1*64").bad_nodes == ("x7",)


def test_values_with_backslashes_do_not_hide_a_job_of_pbs() -> None:
    shown = parse_qstat(Answer('{"Jobs": {"6.s": {"job_state": "R", "PS1": "\\u@\\h"}}}'))
    assert shown["6.s"].state is S.RUNNING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nid0001", ("nid0001",)),
        ("nid[0001-0003,0007],login1", ("nid0001", "nid0002", "nid0003", "nid0007", "login1")),
        ("r[1-2]n[8-9]", ("r1n8", "r1n9", "r2n8", "r2n9")),
        ("None assigned", ()),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_host_lists_are_expanded(text: str, expected: tuple[str, ...]) -> None:
    assert hosts(text) == expected


ENDED = {
    "COMPLETED": Progress(S.COMPLETED, 0, started_at=1.0, ended_at=5.0),
    "FAILED": Progress(S.FAILED, 3, "x", started_at=2.0, ended_at=9.0),
    "TIMEOUT": Progress(S.TIMEOUT, None, "x", started_at=2.0, ended_at=8.0),
    "NODE_FAIL": Progress(S.NODE_FAIL, None, "x", bad_nodes=("n2",)),
    "CANCELLED": Progress(S.CANCELLED),
    "QUEUED": Progress(S.QUEUED, why="waits"),
    "RUNNING": Progress(S.RUNNING, started_at=3.0),
}


@pytest.mark.parametrize(
    ("words", "state", "exit_code", "why"),
    [
        ("QUEUED QUEUED", S.QUEUED, None, "waits"),
        ("QUEUED RUNNING", S.RUNNING, None, "0 of 2 tasks completed"),
        ("COMPLETED QUEUED", S.RUNNING, None, "1 of 2 tasks completed"),
        ("COMPLETED COMPLETED", S.COMPLETED, 0, ""),
        ("COMPLETED TIMEOUT FAILED", S.FAILED, 3, "1 of 3 tasks completed, task 1 TIMEOUT, task 2 "
         "FAILED (exit code 3)"),
        ("COMPLETED NODE_FAIL", S.NODE_FAIL, None, "1 of 2 tasks completed, task 1 NODE_FAIL (n2)"),
        ("CANCELLED COMPLETED", S.CANCELLED, None, "1 of 2 tasks completed, task 0 CANCELLED"),
        ("FAILED FAILED FAILED FAILED FAILED", S.FAILED, 3, "0 of 5 tasks completed, "
         "task 0 FAILED (exit code 3), task 1 FAILED (exit code 3), task 2 FAILED (exit code 3), "
         "and 2 more"),
    ],
)  # fmt: skip
def test_an_array_is_the_sum_of_its_tasks(
    words: str, state: S, exit_code: int | None, why: str
) -> None:
    tasks = dict(enumerate(ENDED[word] for word in words.split()))
    whole = aggregate(tasks)
    assert (whole.state, whole.exit_code, whole.why) == (state, exit_code, why)
    assert sum(whole.tasks.values()) == len(tasks)


def test_an_array_lasts_from_its_first_start_to_its_last_end() -> None:
    whole = aggregate({0: ENDED["COMPLETED"], 1: ENDED["FAILED"]})
    assert (whole.started_at, whole.ended_at) == (1.0, 9.0)
    assert aggregate({0: ENDED["COMPLETED"], 1: ENDED["RUNNING"]}).ended_at is None


def test_an_array_counts_tasks_that_stopped_and_hides_no_failure_behind_them() -> None:
    tasks = {0: Progress(S.FAILED, 85), 1: Progress(S.FAILED, 1)}
    whole = aggregate(tasks)
    assert (whole.state, whole.exit_code) == (S.FAILED, 1)
    assert whole.tasks == {"FAILED": 1, "STOPPED": 1}
    whole = aggregate({0: tasks[0], 1: Progress(S.COMPLETED, 0)})
    assert (whole.state, whole.exit_code) == (S.STOPPED, 85)


def test_a_task_whose_end_pbs_did_not_keep_went_as_the_array() -> None:
    def whole(exit_status: int) -> Progress | None:
        jobs = {
            "15[].s": {"job_state": "F", "Exit_status": exit_status},
            "15[0].s": {"job_state": "X"},
        }
        return array_progress(parse_qstat(Answer(json.dumps({"Jobs": jobs}))), "15[].s")

    good, bad = whole(0), whole(1)
    assert good is not None
    assert good.state is S.COMPLETED
    assert bad is not None
    assert bad.state is S.FAILED


def test_a_scheduler_that_is_down_gives_no_answer() -> None:
    down = Answer("", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    assert parse_squeue(down) is None
    assert parse_sacct(down) is None
    assert parse_qstat(Answer("", "qstat: cannot connect to server", 1)).silence is not None


def test_slurm_without_accounting_has_forgotten_instead_of_being_down() -> None:
    assert parse_sacct(Answer("", "Slurm accounting storage is disabled", 1)) == {}


def test_a_state_that_nobody_knows_yet_is_no_news() -> None:
    shown = parse_squeue(Answer("6|LEVITATING|None\n"))
    assert shown is not None
    assert (dict(shown), shown.unclear) == ({}, {"6": "LEVITATING"})


def test_jobs_of_other_kinds_are_an_answer_as_well() -> None:
    shown = parse_squeue(Answer("7+0|RUNNING|None\n8_[1-3%2]|PENDING|Resources\n"))
    assert shown is not None
    assert set(shown) == {"7+0", "8_[1-3%2]"}


def test_a_reason_and_a_path_may_hold_what_separates_columns() -> None:
    shown = parse_squeue(Answer("6|PENDING|Priority||N/A||/a|b/script.sh\n"))
    assert shown is not None
    assert shown.origins == {("", "/a|b/script.sh"): "6"}


def test_ids_are_found_below_banners() -> None:
    assert pbs.parse_qsub(Answer("Project balance: 12.5 hours\n77.server\n")) == "77.server"
    assert pbs.parse_qsub(Answer("15[].server\n")) == "15[].server"
    assert slurm.parse_sbatch(Answer("Welcome\n42\n")) == "42"
    assert slurm.parse_sbatch(Answer("8653762;gpu\n")) == "8653762;gpu"


def test_a_command_that_is_missing_is_an_answer() -> None:
    assert ask(["no-such-command-here"]).code == 127


@pytest.mark.parametrize(
    "answer",
    [
        Answer("", "sbatch: no answer within 60 s", HUNG),
        Answer("", "", -9),
        Answer("Welcome", "", 0),
        Answer("", "sbatch: error: Socket timed out on send/recv operation", 1),
        Answer("", "qsub: Communication failure.", 1),
    ],
)
def test_a_submission_without_a_clear_answer_is_not_called_refused(answer: Answer) -> None:
    error = refusal("sbatch", answer, slurm.REMEDIES)
    assert isinstance(error, UnconfirmedError)
    assert isinstance(error, LaunchError)
    assert "refused" not in str(error)


def pieces() -> st.SearchStrategy[str]:
    """Return recorded answers that are cut off, torn apart and put together, and any text."""
    cut = st.tuples(st.sampled_from(RECORDED), st.integers(0, 20_000), st.integers(0, 20_000))
    torn = cut.map(lambda c: c[0][: c[1]] + c[0][c[2] :])
    cells = st.sampled_from(
        ["6", "6_1", "6_[0-2]", "RUNNING", "FAILED", "0:0", "9:", "-1", "", "x"]
    )
    rows = st.lists(cells, max_size=11).map("|".join)
    return st.one_of(torn, st.text(), st.lists(rows, max_size=4).map("\n".join))


def some_json() -> st.SearchStrategy[str]:
    """Return JSON of the shape that qstat prints, with values of any type."""
    names = st.sampled_from(
        ["job_state", "Exit_status", "substate", "comment", "run_count", "stime", "exec_host"]
    )
    leaf = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from("FRQHXBE")
    )
    value = st.one_of(leaf, st.lists(leaf, max_size=2))
    job = st.one_of(value, st.dictionaries(names, value))
    ids = st.sampled_from(["6.s", "15[].s", "15[0].s", ""])
    jobs = st.one_of(value, st.dictionaries(ids, job))
    return st.one_of(value, st.fixed_dictionaries({"Jobs": jobs})).map(json.dumps)


@settings(max_examples=300, deadline=None)
@given(out=st.one_of(pieces(), some_json()), err=st.text(), code=st.integers(-9, 255))
def test_no_answer_upsets_a_parser(out: str, err: str, code: int) -> None:
    for answer in (Answer(out, err, code), Answer(out)):
        parse_squeue(answer)
        parse_sacct(answer)
        array_progress(parse_qstat(answer), "15[].s")
        pbs.parse_qsub(answer)
        slurm.parse_sbatch(answer)
        refusal("sbatch", answer, slurm.REMEDIES)
        hosts(out)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FIXTURES.glob("slurm/s*_*.out"))), st.integers(0, 300))
def test_a_truncated_answer_never_ends_a_job_in_another_way(path: Path, kept: int) -> None:
    text = path.read_text("utf-8")
    for parse in (parse_squeue, parse_sacct):
        whole, part = parse(Answer(text)) or {}, parse(Answer(text[:kept])) or {}
        for job, progress in part.items():
            assert progress.state is whole[job].state
            assert progress.exit_code == whole[job].exit_code
