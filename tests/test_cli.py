"""The modules of the command line do what they are for when Python runs them: python -m MODULE."""

from __future__ import annotations

import runpy
import sys

import pytest

from qsgd_hpc.cli import VERBS


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
