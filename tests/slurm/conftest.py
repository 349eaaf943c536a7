"""One real Slurm for all tests of this folder, and a site profile for it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from tests.slurm.bed import Bed, missing
from tests.slurm.profiles import MPIEXEC, PROFILE, SRUN


@pytest.fixture(scope="session")
def slurm() -> Iterator[Bed]:
    """A cluster of four nodes; squeue forgets a job five seconds after its end."""
    if why := missing():
        pytest.skip(why)
    # Not among pytest's own folders, which the database's user cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    bed = Bed(folder, forget_s=5)
    try:
        bed.up()
        yield bed
    finally:
        bed.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bed(slurm: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """The cluster, with an empty registry and an empty working folder."""
    home = tmp_path / "home"
    (home / "sites").mkdir(parents=True)
    (home / "sites" / "bed.yaml").write_text(PROFILE + SRUN)
    (home / "sites" / "mpiexec.yaml").write_text(PROFILE + MPIEXEC)
    folder = tmp_path / "work"
    folder.mkdir()
    # For this test alone: with it, tests of other folders in this process would submit to the bed.
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QSGD_HOME", str(home))
    monkeypatch.setenv("QSGD_SITE", "bed")
    monkeypatch.chdir(folder)
    yield slurm
    for job in jobs.list_jobs():
        if not job.state.ended:
            with contextlib.suppress(LaunchError):  # Slurm never had it
                jobs.cancel(job.id)
    subprocess.run(["scancel", "--user=root"], check=False)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("serial")
