"""The commands with the oldest libraries that pyproject.toml accepts."""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.environments import ROOT, run

pytestmark = [pytest.mark.serial, pytest.mark.gate, pytest.mark.timeout(600)]

# Libraries without compiled code: any of their versions can be installed for this Python.
PURE = ("click", "cloudpickle", "jinja2", "jsonschema", "rich")
EVERY_COMMAND = """
import click
from qsgd_hpc.cli import cli

def show(command, context):
    assert command.get_help(context)
    for name in getattr(command, "list_commands", lambda _: [])(context):
        own = command.get_command(context, name)
        show(own, click.Context(own, info_name=name, parent=context))
        print(name)

print(click.__file__)
show(cli, click.Context(cli))
"""


def test_every_command_works_with_the_oldest_libraries(tmp_path: Path) -> None:
    asked = [Requirement(each) for each in metadata("qsgd-hpc").get_all("Requires-Dist") or ()]
    oldest = [
        f"{each.name}=={bound.version}"
        for each in asked
        for bound in each.specifier
        if each.name in PURE and bound.operator == ">="
    ]
    assert len(oldest) == len(PURE)
    old = tmp_path / "old"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", old)
    run(*pip, *oldest, cwd=ROOT)
    environ = {"PYTHONPATH": f"{old}:{ROOT}"}
    used, *commands = run(sys.executable, "-c", EVERY_COMMAND, cwd=tmp_path, **environ).split()
    assert used.startswith(str(old))
    assert {"run", "submit", "scale", "check"} <= {*commands}
    qsgd_hpc = (sys.executable, "-m", "qsgd_hpc")
    assert "polaris" in run(*qsgd_hpc, "sites", "list", cwd=tmp_path, **environ)
    (tmp_path / "train.py").write_text("print('trained')\n")
    run(*qsgd_hpc, "submit", "--site", "local", "--dry-run", "train.py", cwd=tmp_path, **environ)
    assert "trained" in run(*qsgd_hpc, "run", "-np", "1", "train.py", cwd=tmp_path, **environ)
