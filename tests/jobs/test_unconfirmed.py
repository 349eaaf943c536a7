"""Jobs whose submission no scheduler confirmed: found where they arrived, else lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.schedulers import common, pbs, slurm
from tests.jobs.fake_schedulers import SERVER, Fakes, request, unconfirmed

S = jobs.JobState


def in_squeue(job: Job, comment: str = "") -> str:
    return f"42|RUNNING|None|nid0001|2026-11-21T13:30:12|{comment}|{job.script_path}\n"


def in_qstat(job: Job) -> str:
    path = f"login-1:{job.log_path}"
    return f'{{"Jobs":{{"42.{SERVER}":{{"job_state":"R","Output_Path":"{path}"}}}}}}'


def test_a_slurm_job_that_nobody_confirmed_is_adopted(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "perlmutter")
    fakes.says("squeue", "41|RUNNING|None|nid0009|x||/elsewhere/script.sh\n" + in_squeue(job))
    adopted = jobs.get(job.id)
    assert (adopted.state, adopted.progress.scheduler_id) == (S.RUNNING, "42")
    assert registry.load(job.id).progress.scheduler_id == "42"
    assert slurm.find(job) == "42"


def test_a_slurm_job_is_found_by_its_mark_as_well(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "perlmutter")
    fakes.says("squeue", f"42|PENDING|None||N/A|{common.mark(job.directory)}|/spool/slurm_script\n")
    assert jobs.get(job.id).progress.scheduler_id == "42"


@pytest.mark.usefixtures("settled")
def test_a_slurm_job_that_ended_unconfirmed_is_found_in_accounting(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "perlmutter")
    fakes.says("squeue")
    submit_line = f"42||sbatch --parsable --output=x {job.script_path}"
    fakes.says(
        "sacct",
        before=f"""case "$*" in
        *SubmitLine*) echo '{submit_line}' ;;
        *) echo '42|COMPLETED|0:0|00:00:05' ;;
    esac; exit 0""",
    )
    assert jobs.get(job.id).state is S.COMPLETED


def test_a_pbs_job_that_nobody_confirmed_is_adopted(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "polaris")
    fakes.says("qselect", f"41.{SERVER}\n42.{SERVER}\n")
    fakes.says("qstat", in_qstat(job))
    adopted = jobs.get(job.id)
    assert (adopted.state, adopted.progress.scheduler_id) == (S.RUNNING, f"42.{SERVER}")
    assert fakes.args("qstat")[-2:] == (f"41.{SERVER}", f"42.{SERVER}")
    assert pbs.find(job) == f"42.{SERVER}"


def test_without_qselect_all_live_jobs_of_pbs_are_looked_through(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "polaris")
    fakes.says("qstat", in_qstat(job))
    assert jobs.get(job.id).progress.scheduler_id == f"42.{SERVER}"
    assert fakes.args("qstat") == ("-f", "-F", "json")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("site", ["perlmutter", "polaris"])
def test_a_job_that_never_arrived_is_lost_and_can_be_submitted_again(
    fakes: Fakes, site: str
) -> None:
    job = unconfirmed(fakes, site)
    for name in ("squeue", "sacct", "qselect"):
        fakes.says(name)
    lost = jobs.get(job.id)
    assert lost.state is S.LOST
    assert "submit it again" in lost.progress.why
    assert jobs.cancel(job.id).state is S.LOST


@pytest.mark.parametrize(
    "answer",
    [
        {"err": "sbatch: error: Batch job submission failed: Socket timed out", "rc": 1},
        {"out": "Welcome to this machine"},
        {"before": "sleep 600"},
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_job_that_slurm_took_without_saying_so_is_submitted(
    fakes: Fakes, tmp_path: Path, answer: dict[str, str]
) -> None:
    script = tmp_path / "home" / "jobs" / "perlmutter-1" / "script.sh"
    fakes.says("sbatch", **answer)  # type: ignore[arg-type]
    fakes.says("squeue", f"42|PENDING|Priority||N/A||{script}\n")
    assert jobs.submit(request("perlmutter")).progress.scheduler_id == "42"


def test_a_silent_scheduler_is_no_reason_to_forget_a_job_that_is_cancelled(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "perlmutter")
    with pytest.raises(LaunchError, match="squeue does not answer"):
        slurm.cancel(job)
    with pytest.raises(LaunchError, match="qstat does not answer"):
        pbs.cancel(job)


def test_the_mark_tells_jobs_and_registries_apart(tmp_path: Path) -> None:
    def marked(folder: str, job_id: str) -> str:
        directory = tmp_path / folder / job_id
        job = Job(job_id, "site", "slurm", request("site"), directory, 0.0, Progress())
        return common.mark(job.directory)

    marks = {marked("a", "site-1"), marked("b", "site-1"), marked("a", "site-2")}
    assert len(marks) == 3
    assert marked("a", "site-1") == marked("a", "site-1")
    assert all(set(mark) <= set("qsgd-hpc:@ite0123456789abcdef") for mark in marks)
