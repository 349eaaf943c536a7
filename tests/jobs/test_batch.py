"""Jobs of PBS and Slurm sites from submission to end, on commands that replay recorded answers."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.commands import view
from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.schedulers import common, pbs, slurm
from tests.jobs.fake_schedulers import SERVER, Fakes, cli, request, submitted

S = jobs.JobState
IN_GPU = "CLUSTER: gpu\nJOBID|STATE|REASON|NODELIST|START_TIME|COMMENT|COMMAND\n"


def test_pbs_job_from_submission_to_cancel(fakes: Fakes, tmp_path: Path) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    (call,) = fakes.calls("qsub")
    assert call.cwd == str(tmp_path)
    shell = job.directory / "shell"
    assert call.args == ("-o", str(job.log_path), "-S", str(shell), str(job.script_path))
    assert f"exec /bin/bash -l {job.script_path}'" in shell.read_text()
    assert shell.stat().st_mode & 0o777 == 0o755
    fakes.replays("qstat", "pbs/running")
    assert jobs.get(job.id).state is S.RUNNING
    assert fakes.args("qstat") == ("-f", "-F", "json", "-x", f"8.{SERVER}")
    fakes.replays("qdel", "pbs/qdel_ok")
    jobs.cancel(job.id)
    assert fakes.args("qdel") == (f"8.{SERVER}",)


@pytest.mark.parametrize("reason", ["own shell", "comma", "no interpreter"])
def test_a_pbs_job_without_a_shell_of_ours_has_the_login_shell(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    fakes.says("qsub", f"8.{SERVER}\n")
    asked = request("polaris")
    if reason == "own shell":
        asked = dataclasses.replace(asked, extra=("#PBS -S /bin/tcsh",))
    elif reason == "comma":
        monkeypatch.setenv("QSGD_HOME", str(tmp_path / "a,b"))
    else:
        (tmp_path / "mine.j2").write_text("#PBS -N mine\ntrue\n")
        asked = dataclasses.replace(asked, template=tmp_path / "mine.j2")
    job = jobs.submit(asked)
    assert "-S" not in fakes.args("qsub")
    assert not (job.directory / "shell").exists()


def test_slurm_job_from_submission_to_its_end(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "6")
    assert fakes.args("sbatch") == (
        "--parsable", f"--output={job.log_path}", str(job.script_path),
    )  # fmt: skip
    fakes.replays("squeue", "slurm/squeue_array")
    fakes.replays("sacct", "slurm/sacct_failed")
    ended = jobs.wait([job.id])[0]
    assert (ended.state, ended.exit_code) == (S.FAILED, 3)


def test_pbs_job_that_vanished_is_lost_with_the_likely_reason(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(fakes, "polaris", f"7.{SERVER}")
    fakes.replays("qstat", "pbs/vanished")
    assert jobs.get(job.id).state is S.QUEUED
    monkeypatch.setattr(common, "SETTLE_S", 0.0)
    lost = jobs.get(job.id)
    assert lost.state is S.LOST
    assert "routing queue" in lost.progress.why


@pytest.mark.parametrize(
    ("site", "home", "fault"),
    [
        (
            "polaris",
            "höme",
            "qsub does not accept a path with characters other than printable ASCII",
        ),
        (
            "polaris",
            "a\tb",
            "qsub does not accept a path with characters other than printable ASCII",
        ),
        ("polaris", "a b,c:d%e\\f", None),
        ("perlmutter", "höme a,b:c %j", None),
        ("perlmutter", "a\\b", "sbatch does not accept a path with a backslash"),
    ],
)
def test_a_home_that_the_scheduler_cannot_write_to_is_refused_with_the_remedy(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, site: str, home: str, fault: str | None
) -> None:
    monkeypatch.setenv("QSGD_HOME", str(Path(home).absolute()))
    if fault is None:
        assert submitted(fakes, site, "8.s" if site == "polaris" else "8").log_path.parent.is_dir()
        return
    with pytest.raises(UsageError, match=f"{fault}. Set QSGD_HOME to another folder"):
        jobs.submit(request(site))
    assert fakes.calls() == []
    assert registry.ids() == []


def ended_as(job: Job, state: S, **known: object) -> Job:
    return registry.save(job, Progress(state, scheduler_id="8", **known))  # type: ignore[arg-type]


def test_output_that_will_never_be_is_not_promised(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "8")
    assert "no output yet" in view.no_output_words(job, job.log_path)
    ended_as(job, S.CANCELLED, why="cancelled before it started")
    assert cli("logs", job.id).stderr == (
        f"{job.id} is CANCELLED (cancelled before it started): it never started, so there is no "
        "output and will be none\n"
    )
    assert cli("logs", "-f", "--rank", "1", job.id).exit_code == 0
    assert str(job.log_path) not in cli("wait", job.id).stdout
    ended_as(job, S.FAILED, exit_code=3, started_at=1.0)
    assert f"there is no output: {job.log_path} does not exist" in cli("logs", job.id).stderr
    job.log_path.touch()
    assert cli("wait", job.id).stdout.endswith(f"FAILED  {job.log_path}\n")


def test_wait_names_the_logs_of_an_array_that_are_there(fakes: Fakes) -> None:
    fakes.says("sbatch", out="8\n")
    tasks = dataclasses.replace(request("perlmutter"), array={"lr": ("1", "2")})
    job = ended_as(jobs.submit(tasks), S.FAILED, exit_code=3)
    assert cli("wait", job.id).stdout.endswith("FAILED\n")
    job.task_log_path(1).touch()
    assert cli("wait", job.id).stdout.endswith(f"FAILED  {job.directory}/output-TASK.log\n")
    assert json.loads(cli("status", "--json", job.id).stdout)["log"].endswith("output-TASK.log")


@pytest.mark.usefixtures("settled")
def test_a_job_of_pbs_runs_before_its_start_time_is_there(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fields = {"job_state": "R", "substate": 41, "run_count": 1}
    fakes.says("qstat", json.dumps({"Jobs": {f"8.{SERVER}": fields}}))
    running = jobs.get(job.id)
    assert (running.state, running.progress.started_at) == (S.RUNNING, None)
    assert cli("list").stdout.count("RUNNING") == 1


def test_the_table_breaks_no_line_in_a_terminal_of_100_columns(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    why = "job killed: walltime 300 exceeded limit 60, node x3002c0s13b0n0 said it was over " * 3
    ended = Progress(S.TIMEOUT, why=why, started_at=1.7e9, ended_at=1.7e9 + 90000.0)
    long_name = dataclasses.replace(job.request, name="a_name_of_15chr", nodes=512)
    jobs_shown = [dataclasses.replace(job, progress=ended, request=long_name)] * 2
    for width, cut in ((100, True), (400, False)):
        lines = printed(view.table(jobs_shown, width), width)
        assert len(lines) == 3
        assert all(len(line) <= width for line in lines)
        assert all(line.rstrip().endswith("…") is cut for line in lines[1:])
    assert why in "\n".join(view.status_lines(dataclasses.replace(job, progress=ended)))


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


@pytest.mark.parametrize("name", ["train", "project-subproject:test1-" * 3, "訓練のジョブ名" * 5])
def test_no_terminal_is_too_narrow_for_job_name_state_and_exit(fakes: Fakes, name: str) -> None:
    job = submitted(fakes, "perlmutter", "4")
    named = dataclasses.replace(job.request, name=name)
    reasons = ("", "cancelled", "Job deleted: 依存するジョブが失敗しました。 " * 20)
    for why, width in itertools.product(reasons, (60, 80, 100, 120, 160, 200)):
        ended = Progress(S.CANCELLED, why=why, exit_code=271, ended_at=1.7e9)
        shown = dataclasses.replace(job, progress=ended, request=named)
        head, line = printed(view.table([shown], width), width)
        assert head.split()[:4] == ["job", "name", "state", "exit"]
        assert line.split()[0] == job.id
        assert line.split()[1][:4] == name[:4]
        assert " CANCELLED " in line and " 271" in line
        assert cell_len(line) <= width


@pytest.mark.parametrize("answer", ["qsub_no_account", "qsub_limits", "qsub_maxqueued"])
def test_refused_pbs_job_leaves_no_record(fakes: Fakes, answer: str) -> None:
    fakes.replays("qsub", f"pbs/{answer}")
    with pytest.raises(LaunchError, match=r"qsub refused the job: .*\n.*([Uu]se|range)"):
        jobs.submit(request("polaris"))
    assert registry.ids() == []


def test_a_job_whose_id_cannot_be_recorded_is_submitted_once_and_found_again(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> Job:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    fakes.says("sbatch", "4\n")
    with monkeypatch.context() as disk:
        disk.setattr(registry, "save", full)
        shown = cli("submit", "--site", "perlmutter", "--nodes", "2", "train.py")
    assert shown.exit_code == 0
    assert "is submitted, as 4, but its id cannot be recorded (Disk quota exceeded)" in shown.output
    (job_id,) = registry.ids()
    mark = common.mark(registry.load(job_id).directory)
    fakes.says("squeue", f"4|PENDING|Priority||N/A|{mark}|/spool/script\n")
    assert registry.load(job_id).progress.scheduler_id is None
    assert jobs.get(job_id).progress.scheduler_id == "4"


def test_a_job_whose_files_cannot_be_written_leaves_no_record(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _text: str) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(pbs, "write_file", full)
    with pytest.raises(LaunchError, match=r"was not submitted: .*Disk quota exceeded.*shell"):
        jobs.submit(request("polaris"))
    assert registry.ids() == []


def test_percent_signs_in_a_folder_are_no_patterns(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "100%j"))
    job = submitted(fakes, "perlmutter", "1")
    assert fakes.args("sbatch")[1] == f"--output={tmp_path}/100%%j/jobs/{job.id}/output.log"


def test_variables_of_sbatch_do_not_override_the_request(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    overriding = {
        **{"SBATCH_ACCOUNT": "other", "SBATCH_TIMELIMIT": "1", "SBATCH_REQUEUE": "1"},
        **{"SBATCH_ARRAY_INX": "0-9", "SBATCH_ERROR": "elsewhere", "SBATCH_WAIT": "1"},
        **{"SBATCH_RESERVATION": "other", "SBATCH_WCKEY": "other"},
    }
    kept = {"SBATCH_PARTITION": "of_the_user", "SBATCH_EXPORT": "NONE"}
    for name, value in (overriding | kept).items():
        monkeypatch.setenv(name, value)
    fakes.says("sbatch", "4\n", before='env > "$here/environment"')
    extra = ("#SBATCH --reservation mine", "--wckey=mine")
    jobs.submit(dataclasses.replace(request("perlmutter"), extra=extra))
    lines = (fakes.folder / "environment").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line.startswith("SBATCH_"))
    assert given == kept  # the script names a QOS, but no partition


def test_a_job_does_not_inherit_the_resources_of_the_job_that_submits_it(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")
    fakes.says("sbatch", "4\n", before='env > "$here/environment"')
    environment = fakes.folder / "environment"
    jobs.submit(request("perlmutter"))
    assert "SLURM_CPU_BIND=" in environment.read_text()  # set by the user, outside of a job
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    jobs.submit(request("perlmutter"))
    lines = environment.read_text().splitlines()
    named = {line for line in lines if line.startswith("SLURM_")}
    assert named == {"SLURM_CONF=/etc/slurm/slurm.conf"}


@pytest.mark.usefixtures("settled")
def test_a_requeued_job_counts_its_restarts(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    fakes.replays("squeue", "slurm/squeue_running")
    assert jobs.get(job.id).progress.restarts == 0
    fakes.replays("squeue", "slurm/squeue_requeued")
    again = jobs.get(job.id).progress
    assert (again.state, again.restarts, again.started_at) == (S.QUEUED, 1, None)
    assert jobs.get(job.id).progress.restarts == 1
    fakes.replays("squeue", "slurm/squeue_running")
    assert jobs.get(job.id).progress.restarts == 1
    fakes.says("squeue")
    fakes.says("sacct", "4|REQUEUED|0:0|0\n4|COMPLETED|0:0|0\n")
    assert jobs.get(job.id).progress.restarts == 1


def test_a_job_that_pbs_ran_again_counts_its_restarts(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fakes.replays("qstat", "pbs/running")
    assert jobs.get(job.id).progress.restarts == 0
    fakes.replays("qstat", "pbs/rerun")
    assert jobs.get(job.id).progress.restarts == 1


def test_a_suspended_job_has_not_been_restarted(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    at = "2026-11-21T13:30:12"
    for word, why in (("RUNNING", ""), ("SUSPENDED", "suspended"), ("RUNNING", "")):
        fakes.says("squeue", f"4|{word}|None|nid1|{at}||/x\n")
        now = jobs.get(job.id).progress
        assert (now.state, now.restarts, now.why[:9]) == (S.RUNNING, 0, why)
        assert now.started_at is not None
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    for letter, why in (("R", ""), ("S", "suspended"), ("R", "")):
        shown = {"job_state": letter, "run_count": 1, "stime": "Sat Nov 21 13:26:04 2026"}
        fakes.says("qstat", json.dumps({"Jobs": {f"8.{SERVER}": shown}}))
        now = jobs.get(job.id).progress
        assert (now.state, now.restarts, now.why[:9]) == (S.RUNNING, 0, why)


def test_cancelling_what_is_over_or_unknown_is_no_error(fakes: Fakes) -> None:
    pbs_job = submitted(fakes, "polaris", f"8.{SERVER}")
    slurm_job = submitted(fakes, "perlmutter", "4")
    for answer in ("qdel_finished", "qdel_ok", "qdel_unknown"):
        fakes.replays("qdel", f"pbs/{answer}")
        pbs.cancel(pbs_job)
    for answer in ("scancel_done", "scancel_unknown"):
        fakes.replays("scancel", f"slurm/{answer}")
        slurm.cancel(slurm_job)
    fakes.says("scancel", err="scancel: error: Kill job error: Invalid job id specified", rc=1)
    slurm.cancel(slurm_job)


def test_missing_scheduler_is_told_before_anything_is_registered(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="qsub, which is not on PATH"):
        jobs.submit(request("polaris"))
    assert jobs.render(request("polaris")).startswith("#!/bin/bash")
    assert registry.ids() == []


@pytest.mark.usefixtures("settled")
def test_a_job_of_another_cluster_is_followed_and_cancelled_there(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu")
    job = submitted(fakes, "perlmutter", "8653762;gpu")
    assert "--clusters=gpu" in fakes.args("sbatch")
    assert "#SBATCH --clusters=gpu\n" in job.script_path.read_text()
    monkeypatch.delenv("SLURM_CLUSTERS")  # in another shell
    fakes.says("squeue", IN_GPU + "8653762|RUNNING|None|nid1|2026-11-21T13:30:12||/x\n")
    found = jobs.get(job.id)
    assert (found.state, found.progress.scheduler_id) == (S.RUNNING, "8653762;gpu")
    assert "--clusters=gpu" in fakes.args("squeue")
    fakes.says("squeue", "8653762|COMPLETED|None|nid1|2026-11-21T13:30:12||/x\n".join(
        ["CLUSTER: cpu\n", "CLUSTER: gpu\n"]))  # fmt: skip
    fakes.says("sacct")
    fakes.says("scancel")
    assert jobs.cancel(job.id).state is S.RUNNING  # that was job 8653762 of another cluster
    assert fakes.args("scancel") == ("--clusters=gpu", "8653762")
    fakes.says("squeue", "CLUSTER: cpu\n8653762|COMPLETED|None|nid1|x||/x\n")
    silence = jobs.get(job.id).progress.silence
    assert silence == "Slurm answers for cluster cpu only, not for cluster gpu"
    fakes.says("squeue", err="slurm_load_jobs error: Invalid job id specified", rc=1)
    assert jobs.get(job.id).state is S.LOST
    assert "--clusters=gpu" in fakes.args("sacct")


def test_jobs_wait_for_jobs_of_their_own_cluster_only(fakes: Fakes) -> None:
    first = submitted(fakes, "perlmutter", "7;gpu")
    fakes.says("squeue", IN_GPU + "7|RUNNING|None|nid1|2026-11-21T13:30:12||/x\n")
    wish = dataclasses.replace(request("perlmutter"), after=(first.id,))
    with pytest.raises(
        LaunchError, match="would run in the default cluster and wait for jobs in cl"
    ):
        jobs.submit(wish)
    jobs.submit(dataclasses.replace(wish, extra=("#SBATCH -M gpu,cpu",)))
    assert {"--clusters=gpu", "--dependency=afterok:7"} <= set(fakes.args("sbatch"))
