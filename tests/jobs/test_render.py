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
from qsgd_hpc.jobs.request.validate import complete, fill
from qsgd_hpc.jobs.script import Place, Tools, render_script
from qsgd_hpc.jobs.sites.profile import Site

GOLDEN = Path(__file__).parent.parent / "golden" / "jobs"
TOOLS = Tools("/opt/venv/bin/python", ("/opt/venv/bin/qsgd-hpc",))
JOB_DIR = Path("/home/me/.qsgd-hpc/jobs/machine-7")
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
    "polaris_horovod": (
        "polaris",
        dataclasses.replace(RESNET, account="myproject", horovod=True, env={"QSGD_BITS": "4"}),
    ),
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
    "aurora": ("aurora", dataclasses.replace(RESNET, account="myproject")),
    "aurora_without_ccl": (
        "aurora",
        dataclasses.replace(RESNET, account="myproject", without=("ccl",), gpu_view="one"),
    ),
    "derecho": ("derecho", dataclasses.replace(RESNET, account="uabc0001")),
    "frontera": ("frontera", RESNET),
    "frontier": ("frontier", dataclasses.replace(RESNET, account="abc123")),
    "pbs": ("pbs", dataclasses.replace(RESNET, ranks_per_node=4)),
    "slurm": ("slurm", dataclasses.replace(RESNET, ranks_per_node=4)),
    "sophia": ("sophia", dataclasses.replace(RESNET, account="myproject")),
    "stampede2-knl": ("stampede2-knl", RESNET),
    "stampede3": ("stampede3", dataclasses.replace(RESNET, nodes=4)),
    "stampede3_cpu": ("stampede3", dataclasses.replace(RESNET, queue="skx", nodes=64)),
    "thetagpu": ("thetagpu", dataclasses.replace(RESNET, account="myproject")),
    "vista": ("vista", RESNET),
}
ARRAY = {"lr": ("0.1", "0.2"), "tag": ("a b", "$(id)")}
SHAPES: dict[str, tuple[str, JobRequest]] = {
    f"{site}_{shape}": (site, dataclasses.replace(RESNET, account="myproject", **changes))
    for site in ("polaris", "perlmutter", "thetagpu", "lsf", "local")
    for shape, changes in (
        ("array", {"array": ARRAY, "at_once": 2}),
        ("part", {"chain": 3}),
        (
            "environment",
            {
                "modules": ("gcc/12", "a b"),
                "conda": "my env",
                "venv": Path("/eagle/my venv"),
                "exclude": ("nid1", "nid2"),
                "requeue": True,
                "extra": ("--an-option=of-ones-own",),
            },
        ),
    )
}
CASES |= SHAPES


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


def rendered(site_name: str, request: JobRequest) -> str:
    """Return the script for a request that is not filled yet."""
    site = lsf_site() if site_name == "lsf" else sites.load(site_name)
    filled = complete(fill(request, site))
    place = Place(JOB_DIR)
    if request.chain > 1:
        place = Place(JOB_DIR, JOB_DIR.with_name("machine-6"), attempt=1)
    return render_script(filled, site.at(filled.queue), TOOLS, place)


def lsf_site() -> Site:
    """No machine with LSF has a shipped profile; this is what one may look like."""
    launcher = ("jsrun", "-n", "{ranks}", "-r", "{ranks_per_node}")
    return Site(
        "lsf",
        "a machine with LSF",
        "lsf",
        launcher,
        gpus=6,
        cores=42,
        directives=("-nnodes {nodes}",),
    )


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


@pytest.mark.full
def test_every_script_is_without_a_warning_of_shellcheck() -> None:
    scripts = [str(GOLDEN / f"{case}.sh") for case in CASES]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run(
        [shellcheck, "--severity=warning", "--shell=bash", *scripts],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_every_shipped_profile_has_a_recorded_script() -> None:
    assert set(sites.names()) == {site for site, _ in CASES.values()} - {"lsf"}
    assert all((GOLDEN / f"{name}.sh").is_file() for name in sites.names())


def test_pbs_script_has_no_comment_and_no_gap_among_directives() -> None:
    lines = rendered(*CASES["polaris"]).splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#PBS ")]
    assert directives == list(range(1, len(directives) + 1))
    assert not any("#" in line[1:] for line in lines[: len(directives) + 1])


def test_a_job_of_two_ranks_keeps_each_rank_beside_its_gpu() -> None:
    assert "--ppn 2 --depth=8 " in rendered(*CASES["polaris_two_ranks"])


def test_users_gpu_order_wins() -> None:
    request = dataclasses.replace(CASES["polaris"][1], env={"CUDA_VISIBLE_DEVICES": "0"})
    text = rendered("polaris", request)
    assert "CUDA_VISIBLE_DEVICES=0" in text
    assert "3,2,1,0" not in text


def test_a_library_that_is_out_of_use_is_unset_and_its_directives_go() -> None:
    request = CASES["frontier"][1]
    used = rendered("frontier", request)
    by_flag = rendered("frontier", dataclasses.replace(request, without=("rccl",)))
    mine = Path(os.environ["QSGD_HOME"]) / "sites" / "frontier.yaml"
    mine.parent.mkdir()
    mine.write_text("libraries: {rccl: {use: false}}\n")
    assert by_flag == rendered("frontier", request)
    assert "export FI_CXI_RDZV_PROTO=alt_read\n" in used
    assert "#SBATCH --network=disable_rdzv_get\n" in used
    assert "unset NCCL_SOCKET_IFNAME FI_CXI_RDZV_PROTO\n" in by_flag
    assert "FI_CXI_RDZV_PROTO=" not in by_flag
    assert "disable_rdzv_get" not in by_flag
    assert "export GLOO_SOCKET_IFNAME=hsn0\n" in by_flag


def test_a_variable_of_the_users_stays_where_its_library_is_out_of_use() -> None:
    request = dataclasses.replace(
        CASES["polaris"][1], without=("nccl",), env={"NCCL_CROSS_NIC": "0"}
    )
    text = rendered("polaris", request)
    assert "export NCCL_CROSS_NIC=0\n" in text
    assert "unset NCCL_NET NCCL_NET_GDR_LEVEL NCCL_COLLNET_ENABLE FI_" in text
    assert "LD_LIBRARY_PATH" not in text


@pytest.mark.parametrize("value", ["a\nb", 'a"b', "a'b", "$x", "é", "a#b", ""])
def test_directive_line_refuses_what_it_cannot_carry(value: str) -> None:
    site = sites.load("polaris")
    filled = dataclasses.replace(fill(CASES["polaris"][1], site), name=value)
    with pytest.raises(UsageError, match="scheduler directive"):
        render_script(filled, site, TOOLS, Place(JOB_DIR))


def test_script_that_is_no_python_runs_by_itself() -> None:
    text = rendered("polaris", dataclasses.replace(CASES["polaris"][1], script=Path("run.sh")))
    assert f"    {WORKDIR}/run.sh --epochs 3 &\n" in text


@pytest.mark.parametrize(
    ("site", "fields", "python"),
    [
        ("slurm", {}, TOOLS.python),
        ("slurm", {"venv": Path("env")}, "python"),
        ("slurm", {"venv": Path("env"), "python": "python3.12"}, "python3.12"),
        ("stampede3", {"conda": "base"}, "python3"),
        ("stampede3", {}, "python3"),
    ],
)
def test_the_script_runs_with_the_python_of_the_activated_environment(
    site: str, fields: dict[str, Any], python: str
) -> None:
    request = JobRequest(Path("train.py"), walltime_min=30, workdir=Path("/w"), **fields)
    assert f"    {python} /w/train.py &\n" in rendered(site, request)


def test_a_conda_environment_is_activated_in_a_shell_without_condas_function(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    conda = tmp_path / "conda"
    hook = f'conda() {{ export VALUE="$1 $2" PATH={tmp_path}/bin:$PATH; }}'
    conda.write_text(f"#!/bin/bash\n[ \"$*\" = 'shell.bash hook' ] && echo '{hook}'\n")
    conda.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text(DUMP)
    request = JobRequest(script, workdir=tmp_path, conda="my env")
    site = dataclasses.replace(sites.load("local"), launcher_argv=("env",))
    text = render_script(fill(request, site), site, TOOLS, Place(tmp_path / "job"))
    text = f"unset CONDA_EXE\nPATH={tmp_path}:$PATH\n{text}"
    assert run_body(text, tmp_path) == [[str(script)], "activate my env"]


@pytest.mark.parametrize("name", ["slurm", "pbs", "local"])
def test_files_that_the_setup_reads_do_not_see_the_options_of_a_task(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "setvars.sh").write_text('export VALUE="$# words"\n')
    script = tmp_path / "train.py"
    script.write_text(DUMP)
    request = JobRequest(script, workdir=tmp_path, array={"lr": ("1", "a b")})
    setup = (f". {tmp_path}/setvars.sh",)
    site = dataclasses.replace(sites.load(name), launcher_argv=("env",), setup=setup)
    text = render_script(
        fill(request, site), site, Tools(sys.executable, ()), Place(tmp_path / "job")
    )
    task = {"slurm": "SLURM_ARRAY_TASK_ID=1", "pbs": "PBS_ARRAY_INDEX=1", "local": "set -- 1"}
    seen = run_body(f"{task[name]}\n{text}", tmp_path)
    assert seen == [[str(script), "--lr", "a b"], "0 words"]


def test_ranks_of_slurm_get_the_variables_of_a_job_that_exports_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DUMP.replace("VALUE", "SLURM_EXPORT_ENV"))
    request = JobRequest(script, workdir=tmp_path)
    site = dataclasses.replace(sites.load("slurm"), launcher_argv=("env",))
    text = render_script(
        fill(request, site), site, Tools(sys.executable, ()), Place(tmp_path / "job")
    )
    assert run_body(f"export SLURM_EXPORT_ENV=NONE\n{text}", tmp_path) == [[str(script)], None]


def test_a_request_to_stop_holds_for_the_first_run_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print([os.path.exists('job/stop') * 1])")
    site = dataclasses.replace(sites.load("slurm"), launcher_argv=("env",), setup=())
    request = fill(JobRequest(script, workdir=tmp_path), site)
    text = render_script(request, site, Tools(sys.executable, ()), Place(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "stop").touch()  # the scheduler calls the job RUNNING in its prologue
    assert [run_body(text, tmp_path), run_body(text, tmp_path)] == [[1], [0]]


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("RUNNING:None", True),
        ("COMPLETING:TimeLimit", True),
        ("COMPLETING:None", False),
        ("", True),
    ],
)
def test_a_task_of_slurm_requeues_itself_alone_unless_it_was_cancelled(
    tmp_path: Path, state: str, requeued: bool
) -> None:
    (tmp_path / "bin").mkdir()
    asks = f'echo "$@" >> {tmp_path}/asked'
    for name, body in (("squeue", f"{asks}\necho {state}"), ("scontrol", asks), ("sleep", "")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    request = JobRequest(Path("train.sh"), workdir=tmp_path, array={"n": ("1",)}, requeue=True)
    site = dataclasses.replace(sites.load("slurm"), launcher_argv=("env",), setup=())
    (tmp_path / "train.sh").write_text("#!/bin/bash\nexit 85\n")
    (tmp_path / "train.sh").chmod(0o755)
    text = render_script(fill(request, site), site, TOOLS, Place(tmp_path / "job"))
    given = "SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=0"
    done = subprocess.run(
        ["/bin/bash"],
        input=f"export PATH={tmp_path}/bin:$PATH {given}\n{text}",
        text=True,
        check=False,
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (done.returncode, asked[1]) == (85, "-h -j 7_0 -o %T:%r")
    assert asked[2:] == (["requeue 7_0"] if requeued else [])


# Whatever a command line can carry: any bytes but NUL, as Python shows them in sys.argv.
WORD = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30),
    st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"."))),
    st.sampled_from(
        [
            "$(touch pwned)",
            "`touch pwned`",
            "'; touch pwned; '",
            "\nEND_OF_PIN_SH\ntouch pwned\n",
            ":",
            "--",
            "-c",
            "\n",
        ]
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
@given(
    site_name=st.sampled_from(["local", "slurm", "pbs", "thetagpu"]),
    args=st.lists(WORD, max_size=5),
    value=WORD,
    name=FILE_NAME,
    folder_name=FILE_NAME,
)
def test_any_argument_reaches_the_script_and_executes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    site_name: str, args: list[str], value: str, name: str, folder_name: str,
) -> None:  # fmt: skip
    base = tmp_path_factory.mktemp("hostile")
    folder = base / folder_name
    folder.mkdir()
    script = folder / f"{name}.py"
    script.write_text(DUMP)
    site = dataclasses.replace(sites.load(site_name), launcher_argv=("env",), setup=())
    request = JobRequest(
        Path(script.name), tuple(args), env={"VALUE": value}, workdir=folder, name="x"
    )
    job_dir = tmp_path_factory.mktemp("job") / folder_name
    text = render_script(fill(request, site), site, Tools(sys.executable, ()), Place(job_dir))
    assert run_body(text, folder) == [[str(script), *args], value]
    assert sorted(path.name for path in base.rglob("*")) == sorted([folder_name, script.name])
    own = {"events.jsonl", "meeting", "outcome", "pin.sh", "stop_at"}
    assert {path.name for path in job_dir.iterdir()} <= own
