"""Bad requests, and flags of torchrun, are named, with the values and the remedy."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.options import (
    Host,
    RunOptions,
    check_options,
    chosen_hosts,
    parse_hostfile,
    parse_hosts,
    resolve_command,
    stdin_program_at,
    with_program,
)


def test_hosts_without_a_number_have_one_slot() -> None:
    assert parse_hosts("a:2,b") == (Host("a", 2), Host("b", 1))


def test_each_repetition_of_a_host_adds_its_slots() -> None:
    assert parse_hosts("a,a,b:2,a") == (Host("a", 3), Host("b", 2))


def test_every_malformed_host_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts("a:x,b:0,c:2,")
    assert str(caught.value).count("\n") == 2


def test_hostfile_takes_slots_colons_comments_and_repeated_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# nodes\na slots=2\nb:3  # fat\nc\nc\n\n")
    assert parse_hostfile(file) == (Host("a", 2), Host("b", 3), Host("c", 2))


def test_hostfile_faults_name_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb two\nc:0\n")
    with pytest.raises(UsageError, match=r"line 2: 'b two'(.|\n)*line 3: 'c:0'"):
        parse_hostfile(file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="contains no host"):
        parse_hostfile(file)


def test_all_faults_are_reported_together_with_their_values() -> None:
    hosts = (Host("localhost", 1), Host("no-such-host.invalid", 2))
    faults = check_options(RunOptions(4, ("x",), hosts, bits=9, ranks_per_node=0))
    text = "\n".join(faults)
    assert len(faults) == 4
    assert "--bits 9: choose 1 to 8" in text
    assert "-np 4 needs 4 slots, the hosts have 3" in text
    assert "'no-such-host.invalid' cannot be resolved" in text


def test_more_ranks_than_fit_into_memory_are_refused_before_any_starts():
    (fault,) = check_options(RunOptions(10**9, ("x",)))
    assert "-np 1000000000: the memory of this machine is enough for" in fault
    assert check_options(RunOptions(8, ("x",))) == []
    assert check_options(RunOptions(10**6, ("x",), (Host("localhost", 10**6),))) == []


@pytest.mark.parametrize("bits", [None, *range(1, 9), 32])
def test_allowed_bits_are_no_fault(bits: int | None) -> None:
    assert check_options(RunOptions(1, ("x",), bits=bits)) == []


def test_a_bare_script_gets_this_python(tmp_path: Path) -> None:
    script = tmp_path / 'it\'s "a" script.py'
    script.write_text("")
    assert resolve_command([str(script), "--help"]) == (sys.executable, str(script), "--help")


@pytest.mark.parametrize(
    ("first_line", "is_run_directly"),
    [
        ("#!/usr/bin/env python3\n", False),
        ("#!/usr/bin/python3.11 -u\n", False),
        ("import torch\n", False),  # every file is executable on some file systems
        ("", False),
        ("#!\n", False),
        ("#!/usr/bin/env -S uv run --script\n", True),
        ("#! /bin/bash\n", True),
    ],
)
def test_only_another_program_than_python_runs_an_executable_script(
    tmp_path: Path, first_line: str, is_run_directly: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(first_line)
    for mode, directly in ((0o644, False), (0o755, is_run_directly)):
        script.chmod(mode)
        before = () if directly else (sys.executable,)
        assert resolve_command([str(script), "-x"]) == (*before, str(script), "-x")


def test_a_notebook_is_answered_with_the_way_to_a_script(tmp_path: Path) -> None:
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    for command in ([str(notebook)], ["python3", "-u", str(notebook)]):
        with pytest.raises(UsageError, match=r"jupyter nbconvert --to script .*train\.ipynb"):
            resolve_command(command)


def test_near_names_are_offered_for_a_missing_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for command in ([str(tmp_path / "trian.py")], ["python3", "-u", str(tmp_path / "trian.py")]):
        with pytest.raises(UsageError, match=r"does not exist.*Did you mean 'train.py'"):
            resolve_command(command)


def test_near_names_are_offered_for_a_missing_program(tmp_path: Path) -> None:
    program = tmp_path / "solver"
    program.write_text("")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="Did you mean 'solver'"):
        resolve_command(["solvr"], {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    "command",
    ["python3 -c pass", "python3 -Sc pass", "python3 -m x", "python3 -", "python3", "python3 -V"],
)
def test_python_without_a_script_is_left_alone(command: str) -> None:
    assert resolve_command(command.split()) == tuple(command.split())


@pytest.mark.parametrize(
    ("command", "at"),
    [
        ("python3", 1),
        ("python3 - --epochs 3", 1),
        ("/usr/bin/python3.11 -u -W ignore -Xdev - -c", 5),
        ("numactl -N 0 python -X dev -", 6),
        ("numactl -N 0 python", None),
        ("python3 -X dev train.py -", None),
        ("python3 -uc pass -", None),
        ("python3 -m train -", None),
        ("python3 --version", None),
        ("solver -", None),
    ],
)
def test_a_program_on_stdin_is_seen(command: str, at: int | None) -> None:
    assert stdin_program_at(command.split()) == at


@pytest.mark.parametrize(
    ("text", "fault"),
    [(b"", "there is none"), (b" \n", "none"), (Random(1).randbytes(200_000), "200,000")],
)
def test_a_program_on_stdin_that_cannot_travel_is_refused(text: bytes, fault: str) -> None:
    with pytest.raises(UsageError, match=rf"{fault}(.|\n)*Write the program to a file"):
        with_program(["python", "-"], 1, io.BytesIO(text))


@pytest.mark.parametrize("command", [["bash"], ["sh", "-s", "x"], ["bash", "-"]])
def test_a_shell_that_would_read_stdin_is_refused(command: list[str]) -> None:
    with pytest.raises(UsageError, match="from stdin, which ranks do not have"):
        resolve_command(command)


def test_no_command_is_answered_with_an_example() -> None:
    with pytest.raises(UsageError, match="for example"):
        resolve_command([])


def test_hosts_come_from_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n")
    assert chosen_hosts("a:2", None) == chosen_hosts(None, file) == parse_hosts("a:2")
    assert chosen_hosts(None, None) == ()
    with pytest.raises(UsageError, match="exclude each other"):
        chosen_hosts("a:2", file)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        (["--nproc_per_node", "2"], "--nproc_per_node is a flag of torchrun: -np takes"),
        (["--nproc-per-node=2"], "-np takes the number of all ranks"),
        (["--standalone"], "leave it out"),
        (["-np", "2", "-m", "package.train"], "python -m MODULE"),
        (["--rdzv-conf", "timeout=9"], "leave it out: run decides where the ranks meet"),
        (["--local_addr=node1"], "leave it out: run decides where the ranks meet"),
        (["--log-dir", "logs"], "--output-filename FOLDER"),
        (["--redirects", "3"], "--output-filename FOLDER"),
        (["-t", "3"], "--prefix-output"),
        (["--monitor_interval", "1"], "leave it out"),
        (["--role", "trainer"], "leave it out"),
        (["--start-method", "fork"], "leave it out"),
        (["--no-python"], "write the program in place of the script"),
    ],
)
def test_flags_of_torchrun_are_refused_with_what_to_use_instead(flags: list[str], instead: str):
    with pytest.raises(UsageError, match=instead):
        CliRunner().invoke(cli, ["run", *flags, "t.py"], catch_exceptions=False)


def test_other_unknown_flags_are_answered_with_similar_ones():
    done = CliRunner().invoke(cli, ["run", "--ranks-per-nod", "2", "t.py"])
    assert done.exit_code == 2
    assert "Did you mean '--ranks-per-node'" in done.output
