"""Two clusters with one accounting: jobs are followed and cancelled in the one that has them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import JobRequest, JobState, registry
from qsgd_hpc.jobs.model import Progress
from tests.processes import until
from tests.slurm.bed import Bed

pytestmark = pytest.mark.timeout(600)
WAIT_S = 120.0
SLEEP = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def gpu(slurm: Bed) -> Iterator[Bed]:
    """A second cluster, of one node."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    bed = Bed(folder, cluster="gpu", beside=slurm, nodes=1, forget_s=5)
    try:
        bed.up()
        yield bed
    finally:
        bed.down()
        shutil.rmtree(folder, ignore_errors=True)


def submitted(name: str, body: str) -> jobs.Job:
    Path(name).write_text(body)
    return jobs.submit(JobRequest(Path(name), ranks_per_node=1))


def test_a_job_is_followed_and_cancelled_in_its_cluster(
    bed: Bed, gpu: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # so that numbers of the two clusters meet
        submitted("here.py", "")
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu")
    short, long = submitted("short.py", "print('done')"), submitted("long.py", SLEEP)
    monkeypatch.delenv("SLURM_CLUSTERS")
    assert str(short.progress.scheduler_id).endswith(";gpu")
    (done,) = jobs.wait([short.id], WAIT_S)
    assert done.state is JobState.COMPLETED
    until(lambda: jobs.get(long.id).state is JobState.RUNNING)

    gpu.stop("controller")
    silent = jobs.get(long.id)
    assert silent.state is JobState.RUNNING
    assert "'gpu' can't be reached now" in silent.progress.silence
    with pytest.raises(LaunchError, match="can't be reached now"):
        jobs.cancel(long.id)
    gpu.start_controller()

    until(lambda: not jobs.get(long.id).progress.silence)
    jobs.cancel(long.id)
    (ended,) = jobs.wait([long.id], WAIT_S)
    assert ended.state is JobState.CANCELLED
    assert ended.progress.scheduler_id == long.progress.scheduler_id


def test_a_submission_to_another_cluster_is_found_again(
    bed: Bed, gpu: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu")
    job = submitted("keyed.py", SLEEP)
    monkeypatch.delenv("SLURM_CLUSTERS")
    unconfirmed = registry.save(job, Progress())
    found = jobs.get(unconfirmed.id).progress.scheduler_id
    assert found == job.progress.scheduler_id
    jobs.cancel(job.id)
    (ended,) = jobs.wait([job.id], WAIT_S)
    assert ended.state is JobState.CANCELLED
    registry.save(job, Progress())
    until(lambda: jobs.get(job.id).state is JobState.CANCELLED)  # by accounting alone
