"""Commands of schedulers that do not answer, or hang: what is shown, and what Ctrl-C does."""

from __future__ import annotations

import json
import os
import time

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import registry, waiting
from qsgd_hpc.jobs.schedulers import common, slurm
from tests.jobs.fake_schedulers import SERVER, Fakes, cli, submitted, unconfirmed

SEEN_S = 1_790_000_000.0  # when a scheduler answered last
S = jobs.JobState
DOWN = {"err": "qstat: cannot connect to server polaris (errno=15010)", "rc": 255}


@pytest.mark.usefixtures("settled")
def test_while_the_scheduler_is_silent_the_verbs_say_from_when_the_state_is(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fakes.replays("qstat", "pbs/running")
    jobs.get(job.id)
    os.utime(job.directory / "state.json", (SEEN_S, SEEN_S))
    fakes.says("qstat", **DOWN)  # type: ignore[arg-type]
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(SEEN_S))
    words = f"as of {seen}; PBS does not answer: qstat: cannot connect to server"
    status = cli("status", job.id)
    assert status.exit_code == 4
    assert words in status.stdout
    ran = [line for line in status.stdout.splitlines() if "started" in line]
    assert cli("status", job.id).stdout.splitlines()[3:] == status.stdout.splitlines()[3:]
    assert ran == [line for line in cli("status", job.id).stdout.splitlines() if "started" in line]
    listed = cli("list")
    assert listed.exit_code == 4
    assert "RUNNING" in listed.stdout
    assert words in listed.stdout
    told = json.loads(cli("status", "--json", job.id).stdout)
    assert (told["state"], told["known_at"]) == ("RUNNING", SEEN_S)
    assert told["silence"].startswith("PBS does not answer: ")
    waited = cli("wait", "--timeout", "1s", job.id)
    assert waited.exit_code == 4
    assert words in waited.stdout


@pytest.mark.usefixtures("settled")
def test_a_cancel_that_nobody_heard_says_so_and_what_to_do(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fakes.replays("qstat", "pbs/running")
    fakes.says("qdel", err="qdel: cannot connect to server polaris (errno=15010)", rc=255)
    done = cli("cancel", job.id)
    assert done.exit_code == 4
    assert f"{job.id} is not cancelled: qdel did not end the job: qdel: cannot" in done.stderr
    assert f"Nothing was cancelled. Try again: `qsgd-hpc cancel {job.id}`." in done.stderr
    assert jobs.get(job.id).state is S.RUNNING
    fakes.replays("qdel", "pbs/qdel_ok")
    assert cli("cancel", job.id).exit_code == 0


@pytest.mark.usefixtures("settled", "impatient")
def test_of_a_cancel_that_hangs_nothing_is_claimed(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    fakes.replays("qstat", "pbs/running")
    fakes.hangs("qdel")
    done = cli("cancel", job.id)
    assert done.exit_code == 4
    assert "the scheduler may or may not have received it" in done.stderr
    assert "Nothing was cancelled" not in done.stderr


@pytest.mark.usefixtures("settled")
def test_what_hangs_is_named_while_it_is_waited_for(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "QUIET_S", 0.05)
    monkeypatch.setattr(common, "TIMEOUT_S", 0.2)
    job = submitted(fakes, "polaris", f"8.{SERVER}")
    for name in ("qsub", "qstat", "qselect", "qdel"):
        fakes.hangs(name)

    def told(*words: str) -> list[str]:
        lines = cli(*words).stderr.splitlines()
        return [line.split(",")[0] for line in lines if "qsgd-hpc: waiting for" in line]

    def waits(*names: str) -> list[str]:
        return [f"qsgd-hpc: waiting for {name}" for name in names]

    assert told("status", job.id) == told("list") == waits("qstat")
    assert list(dict.fromkeys(told("cancel", job.id))) == waits("qstat", "qdel")
    # Once, however often it is asked again.
    monkeypatch.setattr(waiting, "BATCH_POLL_S", 0.05)
    assert told("wait", "--timeout", "1s", job.id) == waits("qstat")
    words = ("submit", "--site", "polaris", "--filesystems", "home", "--nodes", "2", "train.py")
    assert told(*words)[:1] == waits("qsub")
    assert json.loads(cli("status", "--json", job.id).stdout)["id"] == job.id


def test_ctrl_c_in_a_submission_is_answered_and_takes_effect_after_it(fakes: Fakes) -> None:
    fakes.says("qsub", out=f"8.{SERVER}\n", before='kill -INT "$PPID"; sleep 0.2')
    words = ("submit", "--site", "polaris", "--filesystems", "home", "--nodes", "2", "train.py")
    done = cli(*words)
    assert done.exit_code == 1
    assert "this ends when the current submission is complete" in done.stderr
    (job_id,) = registry.ids()
    assert registry.load(job_id).progress.scheduler_id == f"8.{SERVER}"
    assert f"{job_id} is submitted; to cancel it: qsgd-hpc cancel {job_id}" in done.stderr


def test_a_job_that_its_scheduler_may_still_accept_is_not_called_cancelled(fakes: Fakes) -> None:
    job = unconfirmed(fakes, "perlmutter")
    fakes.says("squeue")
    fakes.says("sacct")
    done = cli("cancel", job.id)
    assert done.exit_code == 4
    assert f"{job.id} is not cancelled: its scheduler has not confirmed it" in done.stderr
    assert "asked to end" not in done.output


def test_a_job_that_may_live_on_after_its_cancellation_is_an_error(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "4")
    fakes.says("scancel", err="scancel: error: Unable to contact slurm controller", rc=1)
    with pytest.raises(LaunchError, match="scancel did not end the job"):
        slurm.cancel(job)
