"""The doctor finds what is wrong, says what to do, and survives its own mistakes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from qsgd_hpc import doctor as verb
from qsgd_hpc.checkup import CHECKS, Finding, Level, examine, installation, launching
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.claims import NO_MPI
from qsgd_hpc.launch.mpi import Family, Launcher, Library

MPICH = Library("MPICH Version: 5.0.2", "MPICH", (5, 0, 2), Path("/opt/mpich/lib/libmpi.so"))
Install = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a command on a PATH which has no other."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("QSGD_") and name != "QSGD_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    monkeypatch.setattr("socket.getfqdn", lambda: "laptop")
    installation.probe_core.cache_clear()

    def put(name: str, body: str) -> Path:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return put


def levels(found: list[Finding]) -> list[str]:
    return [finding.level.value for finding in found]


def only(found: list[Finding]) -> Finding:
    (one,) = found
    return one


def test_a_check_that_crashes_is_a_fault_and_the_others_go_on() -> None:
    def crashes() -> list[Finding]:
        raise ZeroDivisionError("oh")

    found = examine({"first": crashes, "second": installation.python})
    assert levels(found) == ["fault", "ok"]
    assert "ZeroDivisionError: oh" in found[0].text


@pytest.mark.parametrize(
    ("all_levels", "code", "summary"),
    [
        ([Level.OK, Level.NOTE], 0, "1 ok, one note and no faults"),
        ([Level.OK, Level.FAULT], 1, "1 ok, no notes and one fault"),
    ],
)
def test_exit_code_tells_a_fault(
    all_levels: list[Level], code: int, summary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding(level, "topic", "text", "remedy") for level in all_levels]
    monkeypatch.setattr(verb, "examine", lambda: found)
    result = CliRunner().invoke(verb.doctor, [])
    assert result.exit_code == code
    assert result.output.splitlines()[-1] == summary
    assert "-> remedy" in result.output
    rows = json.loads(CliRunner().invoke(verb.doctor, ["--json"]).output)
    assert [row["level"] for row in rows] == [level.value for level in all_levels]


def test_doctor_imports_no_framework_and_no_core() -> None:
    program = (
        "import sys; from qsgd_hpc.checkup import examine; found = examine(); "
        "print(len(found), {'torch', 'tensorflow', 'jax', 'keras', 'mxnet', 'mpi4py.MPI',"
        " 'qsgd_hpc._core'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    count, imported = done.stdout.split(maxsplit=1)
    assert int(count) >= len(CHECKS)
    assert imported.strip() == "set()"


def test_what_a_shell_says_of_ranks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert levels(launching.torchrun()) == ["ok"]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", "3")
        place, busy, stale = launching.torchrun()
    assert f"at this shell's MASTER_PORT={port}" in place.text
    assert f"MASTER_PORT={port} is not available on this host" in busy.text
    assert stale.remedy == "unset RANK"


def test_core_that_cannot_be_loaded_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(installation.core()) == ["ok"]
    installation.probe_core.cache_clear()
    monkeypatch.setattr(installation, "PROBE", "raise ImportError('wrong ELF class')")
    found = only(installation.core())
    assert found.level is Level.FAULT
    assert "wrong ELF class" in found.text


def test_core_that_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PROBE", "import os; os.kill(os.getpid(), 4)")
    assert "ended with code -4" in only(installation.core()).text


def test_mpi_that_is_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Library:
        raise UsageError(f"no MPI library can be loaded (file too short); {NO_MPI}")

    monkeypatch.setattr(launching, "find_library", missing)
    found = only(launching.mpi())
    assert found.level is Level.FAULT
    assert found.text == "no MPI library can be loaded (file too short)"
    assert found.remedy.startswith("Run pip install 'qsgd-hpc[mpich]'")


def test_mpiexec_of_another_mpi_that_comes_first_is_noted(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = install("mpiexec", "true")
    monkeypatch.setattr(launching, "find_library", lambda: MPICH)
    for path, expected in ((first, ["ok", "ok"]), (tmp_path / "x", ["ok", "ok", "note"])):
        launcher = Launcher(Family.HYDRA, path, "Hydra 5.0.2")
        monkeypatch.setattr(launching, "find_launcher", lambda _, found=launcher: found)
        assert levels(launching.mpi()) == expected


def test_no_mpiexec_matters_less_where_a_scheduler_starts_jobs(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Library) -> Launcher:
        raise UsageError("no mpiexec found")

    monkeypatch.setattr(launching, "find_library", lambda: MPICH)
    monkeypatch.setattr(launching, "find_launcher", missing)
    assert levels(launching.mpi()) == ["ok", "fault"]
    install("sbatch", "true")
    install("scontrol", "true")
    assert levels(launching.mpi()) == ["ok", "note"]


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(installation, "version", version)


def test_frameworks_are_listed_and_too_old_ones_are_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, torch="2.4.0+cpu", jax="0.4.30")
    found = installation.frameworks()
    assert [(f.topic, f.level.value) for f in found] == [("PyTorch", "ok"), ("JAX", "fault")]
    assert "older than 0.5" in found[1].text
    assert "pip install 'qsgd-hpc[jax]'" in found[1].remedy


@pytest.mark.parametrize("there", [True, False])
def test_tensorflow_needs_its_compiled_operations(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "_ops.so"
    if there:
        file.write_bytes(b"")
    installed(monkeypatch, tensorflow_cpu="2.21.0")
    monkeypatch.setattr(installation, "_file", lambda binding, suffix: file)
    found = only(installation.frameworks())
    assert found.level is (Level.OK if there else Level.FAULT)


def test_no_framework_at_all_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    assert only(installation.frameworks()).level is Level.NOTE


def test_site_here_is_named_and_a_broken_profile_is_a_fault(tmp_path: Path) -> None:
    assert only(launching.site()).text.startswith("local: ")
    folder = tmp_path / "home" / "sites"
    folder.mkdir(parents=True)
    (folder / "polaris.yaml").write_text("quue: 1\n")
    found = launching.site()
    assert levels(found) == ["ok", "fault"]
    assert "line 1: unknown key 'quue'" in found[1].text


def test_guessed_site_is_noted(install: Install) -> None:
    install("sbatch", "true")
    install("scontrol", "true")
    found = only(launching.site())
    assert found.level is Level.NOTE
    assert "sites new NAME" in found.remedy


def test_site_without_account_or_command_is_said(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSGD_SITE", "polaris")
    assert "qsub is not on PATH" in only(launching.site()).text
    install("qsub", "true")
    found = launching.site()
    assert found[0].level == "ok"
    assert any("QSGD_ACCOUNT" in each.remedy for each in found[1:])
    monkeypatch.setenv("QSGD_ACCOUNT", "p")
    assert not any("QSGD_ACCOUNT" in each.remedy for each in launching.site())


def test_facts_that_are_not_confirmed_are_noted(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("sbatch", "true")
    install("scontrol", "true")
    monkeypatch.setenv("QSGD_SITE", "perlmutter")
    assert "queues.debug" in launching.site()[1].text


def test_job_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert levels(launching.job_folder()) == ["ok"]
    assert sorted(tmp_path.rglob("*")) == before


def test_job_folder_that_cannot_be_written_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", "/proc/nothing/here")
    found = only(launching.job_folder())
    assert found.level is Level.FAULT
    assert "QSGD_HOME" in found.remedy


@pytest.mark.parametrize(
    ("free_bytes", "level"), [(10 << 30, "ok"), (50 << 20, "note"), (1000, "fault")]
)
def test_little_room_is_said(free_bytes: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    assert levels(launching.job_folder()) == [level]


def test_file_system_without_working_locks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = launching.job_folder()
    assert levels(found) == ["ok", "fault"]
    assert "have no effect" in found[1].text

    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert "Function not implemented" in launching.job_folder()[1].text


def test_file_system_that_renames_onto_a_folder_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "rename", lambda self, target: None)
    found = launching.job_folder()
    assert "replacing another's" in found[1].text


def test_rename_that_fails_for_another_reason_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if target.exists():
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    (found,) = examine({"job folder": launching.job_folder})
    assert found.level is Level.FAULT
    assert "Input/output error" in found.text


def test_shared_memory_counts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(installation, "probe_core", lambda: ("core", 10 << 20))
    for free_bytes, expected in ((64 << 20, "ok"), (25 << 20, "note")):
        monkeypatch.setattr(
            "shutil.disk_usage", lambda _, free=free_bytes: SimpleNamespace(free=free)
        )
        found = only(installation.shared_memory())
        assert found.level.value == expected
    assert "room for two ranks of four cores" in found.text


def test_no_shared_memory_at_all_is_a_note(tmp_path: Path) -> None:
    assert only(installation.shared_memory(tmp_path / "none")).level is Level.NOTE


def test_gpus_are_counted(install: Install) -> None:
    assert "none (none of" in only(installation.gpus()).text
    install("nvidia-smi", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA A100'")
    assert only(installation.gpus()).text == "two GPUs seen by nvidia-smi"
    install("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    found = only(installation.gpus())
    assert found.level is Level.NOTE
    assert "has failed" in found.text


def test_variable_that_nothing_reads_gets_the_nearest_name() -> None:
    found = only(installation.variables({"QSGD_BIT": "4", "HOME": "/", "QSGD_BUILD_JOBS": "2"}))
    assert found.level is Level.NOTE
    assert (found.text, found.remedy) == (
        "QSGD_BIT is not a setting", "Did you mean 'QSGD_BITS'?"
    )  # fmt: skip


def test_value_that_cannot_be_read_is_a_fault() -> None:
    found = only(installation.variables({"QSGD_BITS": "9"}))
    assert found.level is Level.FAULT
    assert "QSGD_BITS='9'" in found.text
    assert levels(installation.variables({"QSGD_BITS": "4"})) == ["ok"]
