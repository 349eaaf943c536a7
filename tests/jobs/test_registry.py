"""Records of jobs as files: what is missing or damaged is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.commands.jobs import list_jobs, status
from qsgd_hpc.jobs.model import JobRequest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


def new_job() -> str:
    request = JobRequest(Path("train.py"), site="local", name="train")
    return registry.create(request, "local", lambda _directory: "").id


DAMAGES = (
    "",
    "{",
    "[]",
    '{"scheduler": "local", "submitted_at": "soon", "request": {"site": "local"}}',
    '{"scheduler": "local", "submitted_at": 1, "request": {"site": "local", "array": []}}',
    '{"scheduler": "of_a_newer_version", "submitted_at": 1, "request": {"site": "local"}}',
)


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_record_is_named_and_hides_no_other_job(text: str) -> None:
    whole, damaged = new_job(), new_job()
    (registry.jobs_dir() / damaged / "request.json").write_text(text)
    with pytest.raises(UsageError, match=f"'{damaged}': damaged record.*Delete the directory"):
        registry.load(damaged)
    for command in (status, list_jobs):
        shown = CliRunner().invoke(command, [])
        assert shown.exit_code == 0
        assert whole in shown.output
    assert f"the record is damaged: {damaged}. See `qsgd-hpc status {damaged}`." in shown.stderr


@pytest.mark.parametrize("job_id", ["local-2", "local-" + "1" * 300, "../local-1", ""])
def test_an_unknown_job_is_told_apart_from_a_damaged_one(job_id: str) -> None:
    new_job()
    with pytest.raises(UsageError, match=r"no job .*local-1"):
        registry.load(job_id)
