"""Arrays of jobs: their output, their tasks, and their end."""

from __future__ import annotations

import dataclasses

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.jobs.model import Job
from qsgd_hpc.jobs.schedulers import pbs, slurm
from tests.jobs.fake_schedulers import SERVER, Fakes, recorded, submitted, unconfirmed

S = jobs.JobState


def array_of(job: Job) -> Job:
    request = dataclasses.replace(job.request, array={"lr": ("0.1", "0.2", "0.3")})
    return dataclasses.replace(job, request=request)


def test_each_task_of_an_array_has_its_own_output(fakes: Fakes) -> None:
    job = array_of(submitted(fakes, "perlmutter", "1"))
    slurm.submit(job)
    assert fakes.args("sbatch")[1] == f"--output={job.directory}/output-%a.log"
    fakes.says("qsub", f"15[].{SERVER}\n")
    assert pbs.submit(job).scheduler_id == f"15[].{SERVER}"
    assert fakes.args("qsub")[1] == f"{job.directory}/output-^array_index^.log"


def test_an_array_of_slurm_is_followed_to_its_end(fakes: Fakes) -> None:
    job = array_of(submitted(fakes, "perlmutter", "11"))
    pending = "".join(f"11_{n}|PENDING|Resources||N/A||/x\n" for n in range(3))
    fakes.says("squeue", pending)
    waiting = slurm.refresh([job])[job.id]
    assert (waiting.state, waiting.tasks) == (S.QUEUED, {"QUEUED": 3})
    assert "free nodes" in waiting.why
    fakes.says("squeue", "11_2|RUNNING|None|nid1|2026-11-21T13:30:12||/x\n")
    fakes.says("sacct", "11_0|COMPLETED|0:0|x\n11_1|FAILED|3:0|x\n")
    running = slurm.refresh([job])[job.id]
    assert running.state is S.RUNNING
    assert running.tasks == {"RUNNING": 1, "COMPLETED": 1, "FAILED": 1}
    assert running.why == "1 of 3 tasks completed, task 1 FAILED (exit code 3)"
    fakes.says("squeue")
    fakes.replays("sacct", "slurm/sacct_array")
    done = slurm.refresh([job])[job.id]
    assert (done.state, done.exit_code, done.tasks) == (S.COMPLETED, 0, {"COMPLETED": 3})


def test_an_array_of_pbs_is_followed_with_its_tasks(fakes: Fakes) -> None:
    job = array_of(submitted(fakes, "polaris", f"15[].{SERVER}"))
    fakes.replays("qstat", "pbs/array")
    done = pbs.refresh([job])[job.id]
    assert (done.state, done.exit_code, done.tasks) == (S.COMPLETED, 0, {"COMPLETED": 3})
    assert fakes.args("qstat") == ("-t", "-f", "-F", "json", "-x", f"15[].{SERVER}")


def test_an_array_of_pbs_that_nobody_confirmed_is_adopted_as_a_whole(fakes: Fakes) -> None:
    job = array_of(unconfirmed(fakes, "polaris"))
    listed = recorded("pbs/array").out.replace(
        "polaris-login-bed:/eagle/myproject/me/run/s1.sh.o15.", f"login-1:{job.directory}/output-"
    )
    fakes.says("qselect", f"15[].{SERVER}\n")
    fakes.says("qstat", listed.replace("^array_index^", "^array_index^.log"))
    adopted = pbs.refresh([job])[job.id]
    assert (adopted.scheduler_id, adopted.tasks) == (f"15[].{SERVER}", {"COMPLETED": 3})


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("codes", "state", "exit_code"),
    [((0, 0, 0), S.COMPLETED, 0), ((0, 3, 85), S.FAILED, 3), ((0, 0), S.LOST, None)],
)
def test_a_forgotten_array_ended_as_its_tasks_recorded(
    fakes: Fakes, codes: tuple[int, ...], state: jobs.JobState, exit_code: int | None
) -> None:
    job = array_of(submitted(fakes, "polaris", f"15[].{SERVER}"))
    fakes.says("qstat", err=f"qstat: Unknown Job Id 15[].{SERVER}\n", rc=153)
    for task, code in enumerate(codes):
        job.task_directory(task).mkdir()
        record = job.task_directory(task) / "events.jsonl"
        record.write_text(f'{{"at": 9, "event": "end", "exit_code": {code}}}\n')
    found = pbs.refresh([job])[job.id]
    assert (found.state, found.exit_code) == (state, exit_code)
    assert found.scheduler_id == f"15[].{SERVER}"
