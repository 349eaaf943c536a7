"""Rendered scripts: as recorded for every profile, and no value ever becomes code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.render import Tools, render_script
from qsgd_hpc.jobs.validate import fill

GOLDEN = Path(__file__).parent.parent / "golden" / "jobs"
TOOLS = Tools("/opt/venv/bin/python", ("/opt/venv/bin/qsgd-hpc",))
WORKDIR = Path("/eagle/myproject/me/run")
RESNET = JobRequest(Path("train_resnet34.py"), ("--epochs", "3"), nodes=8, workdir=WORKDIR)
HOSTILE = dataclasses.replace(
    RESNET,
    script=Path('it\'s a $(rm -rf ~) "scrípt".py'),
    script_args=("", "a b", "`id`", "$HOME", "line\nbreak", "--nodes", "'", "\\", "日本"),
    env={"GREETING": 'say "hi" $USER\n`id`'},
    name="hostile",
)
CASES: dict[str, tuple[str, JobRequest]] = {
    "local": ("local", RESNET),
    "local_hostile": ("local", HOSTILE),
    "polaris": ("polaris", dataclasses.replace(RESNET, account="myproject")),
    "polaris_hostile": ("polaris", dataclasses.replace(HOSTILE, account="myproject")),
    "polaris_prod": (
        "polaris",
        dataclasses.replace(RESNET, nodes=64, walltime_min=300, account="myproject"),
    ),
    "polaris_two_ranks": (
        "polaris",
        dataclasses.replace(RESNET, nodes=1, ranks_per_node=2, account="myproject"),
    ),
    "perlmutter": ("perlmutter", dataclasses.replace(RESNET, account="m1234")),
    "perlmutter_hostile": ("perlmutter", dataclasses.replace(HOSTILE, account="m1234")),
}


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


def rendered(site_name: str, request: JobRequest) -> str:
    """Return the script for a request that is not filled yet."""
    site = sites.load(site_name)
    return render_script(fill(request, site), site, TOOLS)


@pytest.mark.parametrize("case", CASES)
def test_script_is_as_recorded(case: str) -> None:
    """Set GOLDEN_WRITE=1 to record anew, then read the difference."""
    text = rendered(*CASES[case])
    file = GOLDEN / f"{case}.sh"
    if os.environ.get("GOLDEN_WRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_script_is_valid_bash(case: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=rendered(*CASES[case]), text=True, check=False)
    assert checked.returncode == 0


@pytest.mark.parametrize("site_name", sorted({site for site, _ in CASES.values()}))
def test_every_shipped_profile_has_a_recorded_script(site_name: str) -> None:
    assert set(sites.names()) == {site for site, _ in CASES.values()}
    assert (GOLDEN / f"{site_name}.sh").is_file()


def test_pbs_script_has_no_comment_and_no_gap_among_directives() -> None:
    lines = rendered(*CASES["polaris"]).splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#PBS ")]
    assert directives == list(range(1, len(directives) + 1))
    assert not any("#" in line for line in lines[len(directives) + 1 :])
    assert not any("#" in line[1:] for line in lines[: len(directives) + 1])


def test_a_job_of_two_ranks_keeps_each_rank_beside_its_gpu() -> None:
    assert "--ppn 2 --depth=8 " in rendered(*CASES["polaris_two_ranks"])


def test_users_gpu_order_wins() -> None:
    request = dataclasses.replace(CASES["polaris"][1], env={"CUDA_VISIBLE_DEVICES": "0"})
    text = rendered("polaris", request)
    assert "CUDA_VISIBLE_DEVICES=0" in text
    assert "3,2,1,0" not in text


@pytest.mark.parametrize("value", ["a\nb", 'a"b', "a'b", "$x", "é", "a#b", ""])
def test_directive_line_refuses_what_it_cannot_carry(value: str) -> None:
    site = sites.load("polaris")
    filled = dataclasses.replace(fill(CASES["polaris"][1], site), name=value)
    with pytest.raises(UsageError, match="directive line"):
        render_script(filled, site, TOOLS)


def test_script_that_is_no_python_runs_by_itself() -> None:
    text = rendered("polaris", dataclasses.replace(CASES["polaris"][1], script=Path("run.sh")))
    assert f"    {WORKDIR}/run.sh --epochs 3\n" in text


# Whatever a command line can carry: any bytes but NUL, as Python shows them in sys.argv.
WORD = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30),
    st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"."))),
    st.sampled_from(
        ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", ":", "--", "-c", "\n"]
    ),
)
FILE_NAME = st.text(
    st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)
DUMP = "import json,os,sys; print(json.dumps([sys.argv, os.environ.get('VALUE')]))"


def run_body(script: str, folder: Path) -> list[Any]:
    """Run a rendered local script for real and return what its rank saw."""
    done = subprocess.run(
        ["/bin/bash"],
        input=script.encode("utf-8", "surrogateescape"),
        cwd=folder,
        capture_output=True,
        check=True,
    )
    seen: list[Any] = json.loads(done.stdout)
    return seen


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(args=st.lists(WORD, max_size=5), value=WORD, name=FILE_NAME, folder_name=FILE_NAME)
def test_any_argument_reaches_the_script_and_executes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    args: list[str], value: str, name: str, folder_name: str,
) -> None:  # fmt: skip
    base = tmp_path_factory.mktemp("hostile")
    folder = base / folder_name
    folder.mkdir()
    script = folder / f"{name}.py"
    script.write_text(DUMP)
    site = dataclasses.replace(sites.load("local"), launcher_argv=("env",))
    request = JobRequest(
        Path(script.name), tuple(args), env={"VALUE": value}, workdir=folder, name="x"
    )
    text = render_script(fill(request, site), site, Tools(sys.executable, ()))
    assert run_body(text, folder) == [[str(script), *args], value]
    assert sorted(path.name for path in base.rglob("*")) == sorted([folder_name, script.name])
