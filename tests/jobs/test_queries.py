"""What PBS and Slurm are asked, how often, and what a silence or a broken answer means."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.jobs import registry, waiting
from qsgd_hpc.jobs.schedulers import common
from tests.jobs.fake_schedulers import SERVER, Fakes, recorded, request, submitted
from tests.processes import until

S = jobs.JobState


@pytest.mark.parametrize(
    ("site", "scheduler_id", "query", "answer"),
    [
        ("polaris", f"10.{SERVER}", "qstat", "pbs/failed"),
        ("perlmutter", "6", "sacct", "slurm/sacct_failed"),
    ],
)
def test_an_end_is_remembered_without_asking_again(
    fakes: Fakes, site: str, scheduler_id: str, query: str, answer: str
) -> None:
    job = submitted(fakes, site, scheduler_id)
    fakes.says("squeue")
    fakes.replays(query, answer)
    assert jobs.get(job.id).exit_code == 3
    asked = len(fakes.calls())
    fakes.replays("qstat", "pbs/running")
    fakes.replays("squeue", "slurm/squeue_running")
    assert jobs.get(job.id).state is S.FAILED
    assert jobs.cancel(job.id).state is S.FAILED
    assert len(fakes.calls()) == asked


@pytest.mark.usefixtures("settled")
def test_a_lost_job_that_its_scheduler_knows_again_is_not_lost_any_more(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    fakes.replays("squeue", "slurm/squeue_unknown")
    fakes.replays("sacct", "slurm/sacct_unknown")
    assert jobs.get(job.id).state is S.LOST
    fakes.replays("squeue", "slurm/squeue_running")
    assert jobs.get(job.id).state is S.RUNNING


SILENCES = {
    "down": {"err": "slurm_load_jobs error: Unable to contact slurm controller", "rc": 1},
    "no server": {"err": "qstat: cannot connect to server (errno=15010)", "rc": 255},
    "head without jobs": {"out": '{"timestamp": 1, "pbs_server": "polaris"}', "rc": 255},
    "refused": {"err": "Connection refused", "rc": 111},
    "empty with an error": {"err": "error: no answer"},
    "garbage": {"out": "<html>502 Bad Gateway</html>"},
    "killed": {"before": "kill -9 $$"},
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("silence", SILENCES)
@pytest.mark.parametrize(
    ("site", "scheduler_id", "query", "answer"),
    [
        ("polaris", f"8.{SERVER}", "qstat", "pbs/running"),
        ("perlmutter", "4", "squeue", "slurm/squeue_running"),
    ],
)
def test_a_silent_scheduler_changes_nothing(
    fakes: Fakes, site: str, scheduler_id: str, query: str, answer: str, silence: str
) -> None:
    job = submitted(fakes, site, scheduler_id)
    fakes.replays(query, answer)
    running = jobs.get(job.id).progress
    assert running.state is S.RUNNING
    fakes.says(query, **SILENCES[silence])  # type: ignore[arg-type]
    recorded = (job.directory / "state.json").stat()
    first = jobs.get(job.id)
    said = "cannot be parsed; it is kept in" if silence == "garbage" else "does not answer: "
    assert said in first.progress.silence
    assert dataclasses.replace(first.progress, silence="") == running
    assert first.known_at == recorded.st_mtime
    assert jobs.get(job.id) == first
    now = (job.directory / "state.json").stat()  # reading it has changed when it was last read
    assert (now.st_ino, now.st_mtime_ns) == (recorded.st_ino, recorded.st_mtime_ns)
    fakes.replays(query, answer)
    again = jobs.get(job.id)
    assert again.progress == running
    assert again.known_at > recorded.st_mtime


@pytest.mark.usefixtures("settled", "impatient")
def test_a_hanging_query_is_a_silence(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    fakes.hangs("squeue")
    asked = jobs.get(job.id)
    assert asked.state is S.QUEUED
    assert "squeue: no answer within 0.5 s" in asked.progress.silence


@pytest.mark.parametrize("more", [0, 2])
def test_a_job_that_has_noted_its_end_is_asked_for_again_soon_but_not_often(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """Its scheduler says for some more questions that it runs, and has the last word."""
    monkeypatch.setattr(waiting, "SOON_S", 0.05)
    monkeypatch.setattr(waiting, "BATCH_POLL_S", 600.0)
    job = submitted(fakes, "polaris", f"10.{SERVER}")
    running = json.dumps({"Jobs": {f"10.{SERVER}": {"job_state": "R"}}})
    (fakes.folder / "ended").write_text(recorded("pbs/failed").out)
    # Each question adds a character; the job notes its end after the first.
    count = 'printf x >> "$here/asked"; [ "$(wc -c < "$here/asked")" -le {} ] || {}; true'
    fakes.says(
        "qstat", running, before=count.format(more + 2, 'cat "$here/ended" > "$here/qstat.out"')
    )

    def note_end() -> None:
        until((fakes.folder / "asked").exists)
        log.write_text('{"at": 1, "event": "start"}\n{"at": 2, "event": "end", "exit_code": 3}\n')

    log = job.directory / "events.jsonl"
    noting = threading.Thread(target=note_end)
    noting.start()
    (after,) = jobs.wait([job.id], timeout_s=60)
    noting.join()
    assert (after.state, after.exit_code) == (S.FAILED, 3)
    assert len(fakes.calls("qstat")) <= more + 4


def test_an_array_is_asked_for_soon_when_its_last_task_has_noted_its_end(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SOON_S", 0.0)
    fakes.says("sbatch", out="8\n")
    tasks = dataclasses.replace(request("perlmutter"), array={"lr": ("1", "2")})
    job = jobs.submit(tasks)
    patience = waiting.Patience()
    patience.begin([job])
    for task, soon in ((1, False), (0, True)):
        folder = job.directory / f"task-{task}"
        folder.mkdir()
        (folder / "events.jsonl").write_text('{"at": 1, "event": "start"}\n')
        assert not patience.over()
        (folder / "events.jsonl").write_text('{"at": 1, "event": "end", "exit_code": 0}\n')
        assert patience.over() == soon


@pytest.mark.usefixtures("settled")
def test_a_truncated_answer_of_qstat_is_a_silence(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fakes.says("qstat", recorded("pbs/running").out[:-200])
    assert jobs.get(job.id).progress.silence == f"PBS answers, but does not mention job 8.{SERVER}"
    assert len(fakes.calls("qstat")) == 2


@pytest.mark.usefixtures("settled")
def test_an_end_waits_for_accounting_that_is_down(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "6")
    fakes.says("squeue", "6|FAILED|NonZeroExitCode|nid0004|2026-11-21T13:30:12||\n")
    fakes.says("sacct", err="sacct: error: Problem talking to the database", rc=1)
    waiting = jobs.get(job.id)
    assert waiting.state is S.QUEUED
    assert "Slurm's accounting does not answer" in waiting.progress.silence
    fakes.replays("sacct", "slurm/sacct_failed")
    assert jobs.get(job.id).exit_code == 3


@pytest.mark.usefixtures("settled")
def test_an_end_waits_for_accounting_that_lags_behind(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "6")
    fakes.says("squeue", "6|FAILED|NonZeroExitCode|nid0004|2026-11-21T13:30:12||\n")
    fakes.says("sacct", "6|RUNNING|0:0|00:00:05\n")
    assert jobs.get(job.id).state is S.RUNNING
    fakes.replays("sacct", "slurm/sacct_failed")
    assert jobs.get(job.id).exit_code == 3


@pytest.mark.usefixtures("settled")
def test_slurm_without_accounting_still_tells_the_end(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "6")
    fakes.says("squeue", "6|COMPLETED|None|nid0004|2026-11-21T13:30:12||\n")
    fakes.says("sacct", err="Slurm accounting storage is disabled", rc=1)
    assert (jobs.get(job.id).state, jobs.get(job.id).exit_code) == (S.COMPLETED, 0)


def test_one_question_serves_all_jobs_of_a_scheduler(fakes: Fakes) -> None:
    for scheduler_id in ("4", "8"):
        submitted(fakes, "perlmutter", scheduler_id)
    fakes.replays("squeue", "slurm/squeue_dep")
    fakes.replays("sacct", "slurm/sacct_running")
    assert [job.state for job in jobs.list_jobs()] == [S.RUNNING, S.QUEUED]
    assert fakes.args("sacct")[-1] == "4"
    assert len(fakes.calls("squeue") + fakes.calls("sacct")) == 2


def two_hundred(fakes: Fakes, site: str, server: str = "") -> list[str]:
    """Register as many jobs that were submitted, with the ids 0 to 199 of the scheduler."""
    job = submitted(fakes, site, f"0{server}")
    for n in range(1, 200):
        copy = shutil.copytree(job.directory, job.directory.with_name(f"{site}-{n + 1}"))
        state = (copy / "state.json").read_text().replace(f'"0{server}"', f'"{n}{server}"')
        (copy / "state.json").write_text(state)
    return registry.ids()


@pytest.mark.full
@pytest.mark.parametrize("state", ["R", "F"])
def test_two_hundred_jobs_of_pbs_are_one_question(fakes: Fakes, state: str) -> None:
    ids = two_hundred(fakes, "polaris", f".{SERVER}")
    fields = f'{{"job_state":"{state}","Exit_status":0,"substate":92}}'
    listed = ",".join(f'"{n}.{SERVER}":{fields}' for n in range(200))
    fakes.says("qstat", f'{{"Jobs":{{{listed}}}}}')
    before = len(fakes.calls())
    found = jobs.list_jobs()
    assert sorted(job.id for job in found) == sorted(ids)
    assert len(ids) == 200
    assert {job.state for job in found} == {S.RUNNING if state == "R" else S.COMPLETED}
    assert [call.name for call in fakes.calls()[before:]] == ["qstat"]


@pytest.mark.full
def test_two_hundred_jobs_of_slurm_are_one_question(fakes: Fakes) -> None:
    two_hundred(fakes, "perlmutter")
    lines = [f"{n}|RUNNING|None|nid0001|2026-11-21T13:30:12||/x\n" for n in range(200)]
    fakes.says("squeue", "".join(lines))
    before = len(fakes.calls())
    assert {job.state for job in jobs.list_jobs()} == {S.RUNNING}
    assert [call.name for call in fakes.calls()[before:]] == ["squeue"]


def test_ids_beyond_one_command_line_are_asked_in_parts(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "IDS_AT_ONCE", 2)
    for n in range(5):
        submitted(fakes, "perlmutter", str(n))
    fakes.says("squeue")
    fakes.says("sacct")
    jobs.list_jobs()
    assert [call.args[-1] for call in fakes.calls("sacct")] == ["0,1", "2,3", "4"]


NODE_LOSS = (
    "6|NODE_FAIL|0:0|2026-11-21T13:30:12|2026-11-21T13:40:12|00:10:00|3|nid[0004-0006]|None\n"
)


NO_COLUMN = """echo 'sacct: error: Invalid field requested: "FailedNode"' >&2; exit 1"""


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("blame", "node"), [("echo nid0005", "nid0005"), (NO_COLUMN, "nid0006")])
def test_the_node_that_slurm_blames_or_that_is_down_is_named(
    fakes: Fakes, blame: str, node: str
) -> None:
    job = submitted(fakes, "perlmutter", "6")
    fakes.says("squeue")
    fakes.says(
        "sacct",
        before=f"""case "$*" in
        *FailedNode*) {blame} ;;
        *Reason*) printf '{NODE_LOSS}' ;;
        *) echo 'nid[0004-0006]' ;;
    esac; exit 0""",
    )
    fakes.says("sinfo", "nid0006\nnid0099\n")
    lost = jobs.get(job.id).progress
    assert (lost.state, lost.bad_nodes) == (S.NODE_FAIL, (node,))
    assert lost.why == f"node {node} failed"


def test_the_users_own_formats_do_not_change_what_queries_print(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(fakes, "perlmutter", "4")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    words = '"${SQUEUE_STATES-}${SLURM_TIME_FORMAT-}"'
    fakes.says("squeue", "4|RUNNING|None\n", before=f"[ -z {words} ] || exit 1")
    assert jobs.get(job.id).state is S.RUNNING


@pytest.mark.usefixtures("settled")
def test_a_job_that_one_answer_leaves_out_is_asked_for_alone(fakes: Fakes) -> None:
    """The newest qstat, asked for several jobs as JSON, shows the first one only."""
    first, second = (submitted(fakes, "polaris", f"{n}.{SERVER}") for n in (8, 9))
    one = '{{"Jobs": {{"{0}.{1}": {{"job_state": "{2}", "Exit_status": 0}}}}}}'
    fakes.says(
        "qstat",
        before=f"""case "$*" in
            *" 8.{SERVER}"*) echo '{one.format(8, SERVER, "R")}' ;;
            *" 9.{SERVER}"*) echo '{one.format(9, SERVER, "F")}' ;;
        esac; exit 0""",
    )
    assert [job.state for job in jobs.list_jobs()] == [S.RUNNING, S.COMPLETED]
    assert len(fakes.calls("qstat")) == 2
    fakes.says("qstat", one.format(8, SERVER, "R"))
    third = submitted(fakes, "polaris", f"10.{SERVER}")
    silence = jobs.get(third.id).progress.silence
    assert silence == f"PBS answers, but does not mention job 10.{SERVER}"
    assert {first.id, second.id} < {job.id for job in jobs.list_jobs()}


@pytest.mark.parametrize("value", ["005", ".01", "1.", "+5", "nan", "inf", ""])
def test_a_number_that_is_none_of_jsons_hides_no_job(fakes: Fakes, value: str) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    plain = recorded("pbs/running").out
    assert '"Job_Name":\t"sl.sh"' in plain
    fakes.says("qstat", plain.replace('"sl.sh"', value))
    assert jobs.get(job.id).state is S.RUNNING


def test_an_answer_that_cannot_be_read_costs_one_job_and_is_kept(fakes: Fakes) -> None:
    first, second = (submitted(fakes, "polaris", f"{n}.{SERVER}") for n in (8, 9))
    fakes.says("qstat", f"""{{"Jobs": {{
        "8.{SERVER}": {{"comment": "he said "no"", "job_state": "F"}},
        "9.{SERVER}": {{"job_state": "R"}}}}}}""")  # fmt: skip
    bad, good = jobs.list_jobs()
    assert (good.id, good.state, good.progress.silence) == (second.id, S.RUNNING, "")
    kept = bad.directory / "unread_answer.txt"
    why = f"PBS's answer about it cannot be parsed; it is kept in {kept}"
    assert (bad.id, bad.state, bad.progress.silence) == (first.id, S.QUEUED, why)
    assert 'he said "no"' in kept.read_text()
