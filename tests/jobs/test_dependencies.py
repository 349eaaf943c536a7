"""Chains of jobs, and jobs that wait for others."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.commands import view
from qsgd_hpc.jobs.model import Progress
from qsgd_hpc.jobs.schedulers import Dependency, pbs, slurm
from tests.jobs.fake_schedulers import SERVER, Fakes, request, submitted, unconfirmed

S = jobs.JobState


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [(S.STOPPED, True), (S.TIMEOUT, True), (S.COMPLETED, False), (S.FAILED, False)],
)
def test_a_part_goes_on_in_the_next_one_unless_it_has_come_to_an_end(
    fakes: Fakes, state: S, goes_on: bool
) -> None:
    job = submitted(fakes, "perlmutter", "8")
    after = dataclasses.replace(job, id="perlmutter-2", previous=job.id)
    ended = dataclasses.replace(job, progress=Progress(state))
    assert ("it continues this job" in view.next_step(ended, after)) == goes_on
    again = dataclasses.replace(after, previous=None, resumes=job.id)  # by `resubmit --force`
    assert "it continues this job" in view.next_step(ended, again)


def refused_chain(fakes: Fakes, taken: int, ends: dict[str, object], **fields: Any) -> list[str]:
    """Submit a chain of which PBS takes some parts, and return the lines of the error."""
    for n in range(1, taken + 1):
        (fakes.folder / f"id-{n}").write_text(f"{n}.{SERVER}\n")
    full = "qsub: would exceed queue generic's per-user limit"
    first = 'for id in "$here"/id-*; do cat "$id" && rm "$id" && exit 0; done 2> /dev/null'
    fakes.says("qsub", err=full, rc=38, before=first)
    shown = {f"{n}.{SERVER}": {"job_state": "F", "substate": 91, **ends} for n in (1, 2, 3)}
    fakes.says("qstat", json.dumps({"Jobs": shown}))
    with pytest.raises(LaunchError) as refused:
        jobs.submit(dataclasses.replace(request("pbs"), chain=4, **fields))
    said = str(refused.value).splitlines()
    assert said[0] == f"qsub refused the job: {full}"
    return said[2:]


def test_a_chain_that_is_refused_half_way_leaves_nothing(fakes: Fakes) -> None:
    fakes.says("qdel")
    said = refused_chain(fakes, 3, {}, key="nightly")
    assert said == ["Cancelled: pbs-1, pbs-2, pbs-3."]
    # The last first: the end of the first would let the second start.
    assert [call.args for call in fakes.calls("qdel")] == [(f"{n}.{SERVER}",) for n in (3, 2, 1)]
    assert registry.ids() == []
    fakes.says("qsub", f"9.{SERVER}\n")
    assert jobs.submit(dataclasses.replace(request("pbs"), key="nightly")).id == "pbs-1"


def test_a_part_of_a_refused_chain_that_had_started_keeps_its_record(fakes: Fakes) -> None:
    fakes.says("qdel")
    said = refused_chain(fakes, 1, {"stime": "Sat Nov 21 13:26:04 2026"})
    assert said == ["pbs-1 had started before and is CANCELLED now."]
    assert registry.load("pbs-1").state is S.CANCELLED


def test_a_part_of_a_refused_chain_that_lives_on_is_named(fakes: Fakes) -> None:
    fakes.says("qdel", err="qdel: cannot connect to server", rc=255)
    said = refused_chain(fakes, 2, {})
    assert [line.split(" is not cancelled: qdel did not end the job")[0] for line in said] == [
        "pbs-1", "pbs-2",
    ]  # fmt: skip
    assert all(line.endswith(f"Try `qsgd-hpc cancel pbs-{n}`.") for n, line in enumerate(said, 1))
    assert registry.ids() == ["pbs-1", "pbs-2"]


def test_a_job_of_slurm_waits_for_others(fakes: Fakes) -> None:
    job = submitted(fakes, "perlmutter", "1")
    after = (Dependency("ok", "1"), Dependency("any", "3"), Dependency("ok", "2"))
    slurm.submit(job, after)
    assert fakes.args("sbatch")[2:4] == (
        "--dependency=afterok:1:2,afterany:3", "--kill-on-invalid-dep=yes",
    )  # fmt: skip


def test_a_job_that_has_completed_meanwhile_is_not_waited_for(fakes: Fakes) -> None:
    first = submitted(fakes, "perlmutter", "4")
    after = dataclasses.replace(request("perlmutter"), after=(first.id,))
    fakes.says("squeue", "4|COMPLETED|None|nid1|2026-11-21T13:30:12||/x\n")
    fakes.says("sacct", "4|COMPLETED|0:0|0\n")
    fakes.says("sbatch", "5\n")
    jobs.submit(after)
    assert not [word for word in fakes.args("sbatch") if word.startswith("--dependency")]
    assert registry.load(first.id).state is S.COMPLETED


def test_a_job_that_has_failed_meanwhile_is_told_before_submission(fakes: Fakes) -> None:
    first = submitted(fakes, "polaris", f"8.{SERVER}")
    failed = {"job_state": "F", "Exit_status": 3, "stime": "Sat Nov 21 13:26:04 2026"}
    fakes.says("qstat", json.dumps({"Jobs": {f"8.{SERVER}": failed}}))
    with pytest.raises(UsageError, match="FAILED, so this one would never start"):
        jobs.submit(dataclasses.replace(request("polaris"), after=(first.id,)))
    assert len(fakes.calls("qsub")) == 1


@pytest.mark.parametrize("site", ["perlmutter", "polaris"])
def test_a_job_never_starts_without_waiting_for_one_that_is_not_confirmed(
    fakes: Fakes, site: str
) -> None:
    first = unconfirmed(fakes, site)
    fakes.says("sbatch", "5\n")
    fakes.says("qsub", f"5.{SERVER}\n")
    for answer in ("squeue", "sacct", "qselect", "qstat"):
        fakes.says(answer)
    with pytest.raises(LaunchError, match=f"it would wait for {first.id}, which its scheduler has"):
        jobs.submit(dataclasses.replace(request(site), after=(f"any:{first.id}",)))
    assert len(fakes.calls("sbatch") + fakes.calls("qsub")) == 1
    assert registry.ids() == [first.id]


def test_a_job_of_pbs_waits_for_others(fakes: Fakes) -> None:
    job = submitted(fakes, "polaris", f"1.{SERVER}")
    pbs.submit(job, (Dependency("any", f"3.{SERVER}"), Dependency("ok", f"1.{SERVER}")))
    assert fakes.args("qsub")[2:4] == ("-W", f"depend=afterok:1.{SERVER},afterany:3.{SERVER}")
