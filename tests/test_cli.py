"""The modules of the command line do what they are for when Python runs them: python -m MODULE."""

from __future__ import annotations

import errno
import os
import runpy
import sys

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
