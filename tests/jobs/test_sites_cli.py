"""The verb sites: list, show, check and new, on commands that replay recorded answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.commands.sites import sites as verb
from qsgd_hpc.jobs.commands.submit import submit

FIXTURES = Path(__file__).parent.parent / "fixtures"
# What each command answers, by a word among its arguments.
SLURM = {"sbatch": {}, "scontrol": {"": "slurm/scontrol_part"}, "sinfo": {"": "slurm/sinfo"},
         "sacctmgr": {"": "slurm/sacctmgr_qos"}}  # fmt: skip
PBS = {"qsub": {}, "qstat": {"-Q": "pbs/qstat_Q", "-B": "pbs/qstat_B"},
       "pbsnodes": {"": "pbs/pbsnodes"}}  # fmt: skip
Machine = Callable[[dict[str, dict[str, str]]], None]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that gives this machine a scheduler; it has none before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    for name in ("QSGD_SITE", "NERSC_HOST", "TACC_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "login1")
    monkeypatch.setattr("socket.getfqdn", lambda: "login1.somewhere")

    def install(commands: dict[str, dict[str, str]]) -> None:
        for command, answers in commands.items():
            cases = "".join(
                f"*{word}*) /bin/cat {FIXTURES / recorded}.out ;;\n"
                for word, recorded in answers.items()
            )
            (folder / command).write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
            (folder / command).chmod(0o755)

    return install


def call(*words: str) -> Result:
    result = CliRunner().invoke(verb, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def override(name: str, text: str) -> Path:
    file = env.home() / "sites" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def line(output: str, start: str) -> str:
    (found,) = [each for each in output.splitlines() if each.lstrip("* ").startswith(start)]
    return found


def test_list_marks_the_site_used_here_and_the_retired() -> None:
    output = call("list").output
    assert line(output, "local").startswith("*")
    assert not line(output, "polaris").startswith("*")
    assert "(retired)" in line(output, "thetagpu")
    assert "(retired)" not in line(output, "sophia")


def test_list_counts_what_is_not_confirmed() -> None:
    rows = {row["name"]: row for row in json.loads(call("list", "--json").output)}
    assert rows["local"]["unconfirmed"] == 0
    assert rows["polaris"]["unconfirmed"] == 4  # two of its network, two of its libraries
    assert rows["perlmutter"]["unconfirmed"] == 12
    assert rows["thetagpu"]["retired"]
    assert [name for name, row in rows.items() if row["here"]] == ["local"]


def test_list_goes_on_past_a_profile_that_is_broken() -> None:
    override("polaris", "quue: 1\n")
    rows = {row["name"]: row for row in json.loads(call("list", "--json").output)}
    assert "Did you mean 'queues'?" in rows["polaris"]["fault"]
    assert rows["perlmutter"]["fault"] == ""
    assert "not usable" in line(call("list").output, "polaris")


def test_show_names_file_and_line_of_every_value() -> None:
    file = override("polaris", "# mine\ndefaults: {account: me}\n")
    shown = json.loads(call("show", "polaris", "--json").output)
    assert shown["origins"]["defaults.account"] == f"{file}:2"
    assert shown["profile"]["defaults"]["account"] == "me"
    where, number = shown["origins"]["queues.debug.nodes"].rsplit(":", 1)
    assert "debug: {nodes: [1, 2]" in Path(where).read_text().splitlines()[int(number) - 1]


def test_show_prints_the_walltime_of_each_bin() -> None:
    output = call("show", "frontier").output
    assert "92 to 183 nodes     up to 06:00:00" in output


@pytest.mark.parametrize("name", ["local", "polaris", "aurora", "frontier", "thetagpu"])
def test_files_are_checked_without_a_scheduler(name: str) -> None:
    result = call("check", name)
    assert result.exit_code == 0
    assert f"{name}: files are sound; not compared" in result.output


def test_check_without_name_and_scheduler_checks_all() -> None:
    result = call("check")
    assert result.exit_code == 0
    assert result.output.count("files are sound") == len(sites.names())
    assert override("polaris", "quue: 1\n").exists()
    result = call("check")
    assert result.exit_code == 1
    assert "polaris: fault" in result.output


def test_check_lists_what_is_not_confirmed_with_file_and_line() -> None:
    output = call("check", "perlmutter").output
    where = line(output, "to verify  queues.debug ").split()[-1]
    path, number = where.rsplit(":", 1)
    assert "debug: {" in Path(path).read_text().splitlines()[int(number) - 1]


def test_check_compares_pbs_queues_with_the_profile(machine: Machine) -> None:
    machine(PBS)
    result = call("check", "polaris", "--json")
    assert result.exit_code == 1
    (report,) = json.loads(result.output)
    rows = {row["fact"]: row for row in report["differs"]}
    assert rows["nodes"]["machine"] == "2"
    assert rows["queues.demand"]["machine"] == "no queue demand"
    assert rows["queues.debug.walltime"]["machine"] == '["00:00:05", "01:00:00"]'
    where = rows["queues.debug.walltime"]["change"].split(": ")[0]
    path, number = where.rsplit(":", 1)
    assert "debug: {nodes" in Path(path).read_text().splitlines()[int(number) - 1]
    assert "queues.prod.routes" not in rows


def test_check_compares_qos_with_the_profile(machine: Machine) -> None:
    machine(SLURM)
    result = call("check", "perlmutter")
    assert result.exit_code == 1
    assert "no QOS preempt" in result.output
    assert "queues.debug.walltime" not in result.output
    assert "node.gpus" not in result.output
    assert "queues.debug.nodes" not in result.output


def test_check_of_another_machine_compares_nothing(machine: Machine) -> None:
    machine(PBS)
    override("here", "extends: pbs\nlogin_hosts: [login1]\n")
    result = call("check", "polaris")
    assert result.exit_code == 0
    assert "not compared: this is a login host of here" in result.output


def test_check_asks_no_scheduler_when_told_so(machine: Machine) -> None:
    machine(PBS)
    result = call("check", "polaris", "--no-machine")
    assert result.exit_code == 0
    assert "not compared" in result.output


def test_scheduler_that_does_not_answer_is_said(machine: Machine) -> None:
    machine({"qsub": {}, "qstat": {}})
    result = call("check", "polaris")
    assert result.exit_code == 0
    assert "`qstat -Q -f -F json` does not answer in JSON" in result.output


def test_question_without_answer_leaves_its_part_open(machine: Machine) -> None:
    machine({"qsub": {}, "qstat": PBS["qstat"]})
    result = call("check", "polaris", "--json")
    (report,) = json.loads(result.output)
    assert "incomplete: `pbsnodes -a -F json` gave no answer" in report["compared"]
    assert "nodes" not in {row["fact"] for row in report["differs"]}


@pytest.mark.parametrize("commands", [PBS, SLURM])
def test_new_profile_is_as_the_machine_it_was_written_on(
    machine: Machine, commands: dict[str, dict[str, str]]
) -> None:
    machine(commands)
    assert call("new", "mine").exit_code == 0
    result = call("check", "mine")
    assert result.exit_code == 0, result.output
    command = "qstat" if commands is PBS else "scontrol"
    assert f"compared with {command} on this machine" in result.output
    assert "to verify" in result.output
    assert sites.choose(None, sites.find_host()).name == "mine"


def test_new_profile_knows_gpus_routes_and_limits(machine: Machine) -> None:
    machine(PBS)
    call("new", "mine")
    site = sites.load("mine")
    assert (site.gpus, site.nodes) == (4, 2)
    assert site.queues["prod"].routes == ("small", "medium", "large")
    assert site.queues["small"].via == "prod"
    assert site.queues["debug"].walltime_min == (5 / 60, 60)


def test_new_refuses_to_overwrite(machine: Machine) -> None:
    machine(SLURM)
    file = override("mine", "extends: slurm\n")
    with pytest.raises(UsageError, match="--force to replace it"):
        call("new", "mine")
    assert file.read_text() == "extends: slurm\n"
    call("new", "mine", "--force")
    assert "queues:" in file.read_text()


def test_new_refuses_the_name_of_a_shipped_site(machine: Machine) -> None:
    machine(SLURM)
    with pytest.raises(UsageError, match="`qsgd-hpc sites check polaris` compares it"):
        call("new", "polaris")


def test_new_prints_without_writing(machine: Machine) -> None:
    machine(SLURM)
    assert "extends: slurm" in call("new", "mine", "--stdout").output
    assert not (env.home() / "sites").exists()


def test_new_without_scheduler_says_where_to_run_it() -> None:
    with pytest.raises(UsageError, match=r"no scheduler here \(neither qstat nor scontrol"):
        call("new", "mine")
    assert "# queues:" in call("new", "mine", "--scheduler", "pbs", "--stdout").output


@pytest.mark.parametrize("name", ["../x", "a b", ""])
def test_new_refuses_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name of a site"):
        call("new", name, "--scheduler", "pbs")


def test_a_profile_for_lsf_is_written_by_hand(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"by hand, as .*/sites/mine.yaml: docs/jobs.md has"):
        call("new", "mine", "--scheduler", "lsf")
    machine({"bsub": {}})
    with pytest.raises(UsageError, match="a profile for lsf must be written by hand"):
        call("new", "mine")


def test_the_profile_for_lsf_of_the_page_is_sound() -> None:
    page = Path(__file__).parents[2] / "docs" / "jobs.md"
    (text,) = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    override("mine", text)
    checked = call("check", "mine", "--no-machine")
    assert checked.exit_code == 0
    assert checked.output.startswith("mine: files are sound")
    Path("train.py").touch()
    words = ["--nodes", "2", "--ranks-per-node", "4", "--dry-run", "train.py"]
    script = CliRunner().invoke(submit, ["--site", "mine", *words]).stdout
    assert "#BSUB -n 8\n#BSUB -R span[ptile=4]\n" in script
    assert "\nmpirun -n 8 \\\n" in script
