"""What docs/jobs.md shows is what the commands print, and its example resumes to the same bits."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from qsgd_hpc import jobs
from qsgd_hpc.cli import cli
from tests.docs.pages import BLOCK, assert_printed, blocks, sessions

pytestmark = pytest.mark.serial

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"
# Times, folders and how busy the machine is differ; every other character must be the same.
VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\d\d:\d\d:\d\d$|/home/me/\.qsgd-hpc|/home/me/project"
)
# Trains nothing: says what it was given; with a number of steps, needs three jobs to get there.
STAND_IN = """
import os, sys
print(sys.argv[1:], os.environ.get("QSGD_ATTEMPT"))
sys.exit(85 if sys.argv[1:] == ["100000"] and int(os.environ.get("QSGD_ATTEMPT", 0)) < 2 else 0)
"""


def said() -> str:
    """Return what the page says between its blocks."""
    return BLOCK.sub("", PAGE.read_text(encoding="utf-8"))


def commands() -> list[str]:
    """Return every complete command of the page, those within sentences too."""
    shown = [session.command for session in sessions(PAGE)]
    listed = [line for info, text in blocks(PAGE, "") if not info for line in text.splitlines()]
    found = re.findall(r"`(qsgd-hpc [^`]+)`", said())
    return [command for command in (*shown, *listed, *found) if command.startswith("qsgd-hpc ")]


def parse(command: str) -> None:
    """Give the words to click's parser, which refuses unknown verbs, options and values."""
    words = shlex.split(command, comments=True)[1:]
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group):
        name, group, words = group.resolve_command(context, words)
        assert group is not None
        context = click.Context(group, info_name=name, parent=context)
    if words:  # a verb alone is the name of the verb, not a command
        group.make_context(group.name, words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project folder, and a home of its own for jobs, which are ended afterwards."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("QSGD_SITE", "local")
    for name in ("QSGD_ACCOUNT", "QSGD_JOB_DIR", "QSGD_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "qsgd-hpc"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m qsgd_hpc "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(project)
    yield project
    for job in jobs.list_jobs():
        jobs.cancel(job.id)


def run(command: str) -> str:
    done = subprocess.run(
        command,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stdout, f"{command}\n{done.stdout}"
    return done.stdout


def masked(line: str) -> str:
    return VOLATILE.sub("#", line).rstrip()


@pytest.mark.gate
@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_command_is_one_that_there_is(command: str) -> None:
    try:
        parse(command)
    except click.UsageError as error:
        pytest.fail(f"docs/jobs.md: {command}: {error.format_message()}")


@pytest.mark.gate
def test_an_option_that_there_is_not_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse("qsgd-hpc submit --chian 3 train.py")


@pytest.mark.gate
def test_options_that_the_page_names_are_there() -> None:
    known = {option for verb in cli.list_commands(click.Context(cli)) for option in _options(verb)}
    words = " ".join(re.findall(r"`([^`\n]+)`", said()))
    # Without the script's own, and one of Slurm's.
    named = set(re.findall(r"(?<!\S)--[a-z-]+", words)) - {"--lr", "--seed", "--signal"}
    assert len(named) > 25
    assert named <= known


def _options(verb: str) -> set[str]:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return {word for parameter in command.params for word in parameter.opts}


def test_every_command_prints_what_the_page_says(folder: Path) -> None:
    """In order and in one folder, as a reader would."""
    (folder / "train.py").write_text(STAND_IN)
    (folder / "evaluate.py").write_text("print('evaluated')")
    assert len(sessions(PAGE)) > 12
    home = os.environ["QSGD_HOME"]
    for session in sessions(PAGE):
        printed = run(session.command).replace(home, "/home/me/.qsgd-hpc")
        assert_printed(session, printed.replace(str(folder), "/home/me/project"), masked)


@pytest.mark.gate
def test_the_python_example_runs(folder: Path) -> None:
    (folder / "train.py").write_text(STAND_IN)
    (example,) = [text for _, text in blocks(PAGE, "python") if "JobRequest" in text]
    (folder / "example.py").write_text(example)
    printed = run(f"{shlex.quote(sys.executable)} example.py")
    assert printed.startswith("#!/bin/bash\nlocal-1 COMPLETED 0\n"), printed
    assert "[0] ['3000'] None" in printed


def test_the_training_example_stopped_and_resubmitted_ends_with_the_same_loss(folder: Path) -> None:
    pytest.importorskip("torch")
    (example,) = [text for _, text in blocks(PAGE, "python") if text.startswith("# train.py")]
    # Slow enough to be stopped on the way, however fast the machine is.
    step = "    step += 1\n"
    assert step in example
    slowed = example.replace(step, f"{step}    __import__('time').sleep(0.01)\n")
    (folder / "train.py").write_text(slowed)
    whole = jobs.submit(jobs.JobRequest(Path("train.py"), ("300",), nodes=2))
    assert jobs.wait([whole.id], 120)[0].state is jobs.JobState.COMPLETED, _log(whole)
    first = jobs.submit(jobs.JobRequest(Path("train.py"), ("300",), nodes=2))
    while "begins at step 0" not in _log(first):
        time.sleep(0.1)
    jobs.stop(first.id)
    assert jobs.wait([first.id], 120)[0].state is jobs.JobState.STOPPED, _log(first)
    second = jobs.resubmit(first.id)
    assert jobs.wait([second.id], 120)[0].state is jobs.JobState.COMPLETED, _log(second)
    assert "begins at step 0" not in _log(second)
    assert _losses(second) == _losses(whole)


def _log(job: jobs.Job) -> str:
    return job.log_path.read_text() if job.log_path.exists() else ""


def _losses(job: jobs.Job) -> list[str]:
    found = sorted(line for line in _log(job).splitlines() if "ends with loss" in line)
    assert len(found) == 2
    return found
