"""The modules of the command line do what they are for when Python runs them: python -m MODULE."""

from __future__ import annotations

import errno
import os
import runpy
import sys
from pathlib import Path

import pytest

from qsgd_hpc.cli import VERBS, cli, main


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("qsgd_hpc", ""),
        ("qsgd_hpc.cli", ""),
        *((where.partition(":")[0], verb) for verb, (where, _) in VERBS.items()),
    ],
)
def test_a_module_run_by_its_name_is_its_verb(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = [verb for verb, (where, _) in VERBS.items() if where.startswith(f"{module}:")]
    # A module of several verbs takes one of them as its first argument.
    monkeypatch.setattr(sys, "argv", ["", *([name] if len(verbs) > 1 else ()), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"Usage: qsgd-hpc {name}".rstrip())


@pytest.mark.parametrize(
    ("number", "name", "text"),
    [
        (errno.EDQUOT, "/home/me/x", "qsgd-hpc: /home/me/x: Disk quota exceeded\n"),
        (errno.ENOSPC, None, "qsgd-hpc: No space left on device\n"),
        (errno.ENOENT, None, "qsgd-hpc: the current folder no longer exists; change to"),
    ],
)
def test_a_fault_of_the_users_files_has_no_traceback(
    number: int,
    name: str | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(text)


def test_a_fault_of_this_package_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main([])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["submitt", "train.py"], "No such command 'submitt'. Did you mean 'submit'?"),
        (["train.py", "--lr", "1"], "Start it by: qsgd-hpc run -np 2 train.py"),
        (["frobnicate"], "No such command 'frobnicate'."),
    ],
)
def test_a_word_that_is_no_command_has_a_remedy(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-np", "2", "--config-file", "none.yaml", "true"],
        ["scale", "none.yaml"],
        ["submit", "--site", "local", "--template", "none.yaml", "--dry-run", __file__],
    ],
)
def test_a_file_that_is_not_there_is_named_once(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.count("none.yaml") == 1
    assert "No such file or directory" in line
    assert "Errno" not in line


@pytest.mark.parametrize("verb", ["status", "logs"])
def test_help_shows_that_a_job_need_not_be_named(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert capsys.readouterr().out.startswith(f"Usage: qsgd-hpc {verb} [OPTIONS] [ID]\n")
