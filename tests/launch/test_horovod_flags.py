"""horovodrun's flags: what they set, what changes nothing, and its configuration file."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from qsgd_hpc import env
from qsgd_hpc.cli import cli
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.horovod_flags import (
    IGNORED,
    SETTINGS,
    effects,
    read_config,
)
from qsgd_hpc.launch.options import RunOptions


@pytest.fixture
def asked(monkeypatch):
    """Return asked(*flags): the request that the command line makes, and what it says."""
    requests = []
    monkeypatch.setattr("qsgd_hpc.launch.cli.launch", lambda options: requests.append(options))

    def invoke(*flags: str) -> tuple[RunOptions, str]:
        done = CliRunner().invoke(cli, ["run", "-np", "2", *flags, "true"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return requests[-1], done.output

    return invoke


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--fusion-threshold-mb", "32"], {"QSGD_FUSION_BYTES=33554432"}),
        (["--cycle-time-ms", "3.5"], {"QSGD_CYCLE_TIME_MS=3.5"}),
        (["--cache-capacity", "0"], {"QSGD_CACHE_CAPACITY=0"}),
        (["--hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE=1"}),
        (["--no-hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE=0"}),
        (["--autotune", "--autotune-log-file", "a.csv"],
         {"QSGD_AUTOTUNE=1", "QSGD_AUTOTUNE_LOG=a.csv"}),
        (["--timeline-filename", "t.json", "--timeline-mark-cycles"],
         {"QSGD_TIMELINE=t.json", "HOROVOD_TIMELINE_MARK_CYCLES=1"}),
        (["--no-stall-check"], {"QSGD_STALL_WARNING_S=0", "QSGD_STALL_SHUTDOWN_S=0"}),
        (["--stall-check"], set()),
        (["--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9"],
         {"QSGD_STALL_WARNING_S=5.0", "QSGD_STALL_SHUTDOWN_S=9.0"}),
        (["--log-level", "DEBUG"], {"QSGD_LOG_LEVEL=DEBUG"}),
        (["--cycle-time-ms", "3", "--env", "QSGD_CYCLE_TIME_MS=4"], {"QSGD_CYCLE_TIME_MS=4"}),
        ([], set()),
    ],
)  # fmt: skip
def test_flag_sets_the_variable_for_the_ranks(asked, flags, variables):
    options, output = asked(*flags)
    assert {f"{name}={value}" for name, value in options.env.items()} == variables
    assert output == ""


def test_flags_win_against_other_variables_of_the_environment(asked, monkeypatch):
    monkeypatch.setenv("QSGD_ALGORITHM", "ring")
    monkeypatch.setenv("QSGD_STALL_WARNING_S", "0")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    options, _ = asked("--hierarchical-allreduce", "--stall-check")
    ranks = {**os.environ, **options.env}
    assert env.get("QSGD_ALGORITHM", ranks) == "hierarchical"
    assert env.get("QSGD_STALL_WARNING_S", ranks) == env.TABLE["QSGD_STALL_WARNING_S"].default
    options, _ = asked("--stall-check", "--stall-check-warning-time-seconds", "7")
    assert env.get("QSGD_STALL_WARNING_S", {**os.environ, **options.env}) == 7


def test_a_value_that_its_variable_cannot_have_is_refused_before_any_rank_starts(asked):
    with pytest.raises(UsageError, match=r"QSGD_LOG_LEVEL='foo': expected"):
        asked("--log-level", "foo")


@pytest.mark.parametrize("option", sorted(IGNORED))
def test_flag_without_effect_is_accepted_and_says_why(asked, option):
    for name in (option, *IGNORED[option].also):
        _, output = asked(name, *["7"] * IGNORED[option].values)
        assert output == (
            f"qsgd-hpc run: {option}: {IGNORED[option].why}; the flag has no effect\n"
        )


def test_discovery_of_hosts_is_refused_with_the_remedy(asked):
    with pytest.raises(UsageError, match=r"--host-discovery-script.*list them with -H"):
        asked("--host-discovery-script", "x")


def test_wrong_value_of_a_flag_names_its_variable_and_choices():
    with pytest.raises(UsageError, match=r"QSGD_LOG_LEVEL='loud'.*trace, debug"):
        CliRunner().invoke(
            cli, ["run", "-np", "2", "--log-level", "loud", "true"], catch_exceptions=False
        )


CONFIG = """
verbose: true
params:
  fusion_threshold_mb: 16
  cycle_time_ms: 2
  hierarchical_allgather: true
autotune:
  enabled: true
timeline:
  filename: t.json
  mark_cycles: null
stall_check:
  enabled: false
logging:
  level: INFO
  with_timestamp: true
controller: mpi
"""


def test_configuration_file_sets_what_the_command_line_does_not(asked, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    variables, _, remarks = effects({"cycle_time_ms": 5.0, "autotune": None}, file)
    assert variables == {
        "QSGD_FUSION_BYTES": str(16 << 20),
        "QSGD_CYCLE_TIME_MS": "5.0",
        "QSGD_AUTOTUNE": "1",
        "QSGD_TIMELINE": "t.json",
        "QSGD_STALL_WARNING_S": "0",
        "QSGD_STALL_SHUTDOWN_S": "0",
        "QSGD_LOG_LEVEL": "INFO",
    }
    assert asked("--config-file", str(file))[0].verbose
    assert [remark.split(":")[0] for remark in remarks] == [
        "--hierarchical-allgather",
        "--log-with-timestamp",
        "--mpi",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("params:\n  cycle_tme_ms: 1", "params.cycle_tme_ms is not known; did you mean params.cycle"),
     ("autotune:\n  enabled: 3", "autotune.enabled is 3; expected a bool"),
     ("params:\n  cache_capacity: many", "params.cache_capacity is 'many'; expected a int"),
     ("just words", "just words is not known"), ("a: [", "config.yaml")],
)  # fmt: skip
def test_wrong_configuration_is_named(tmp_path, text, fault):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_config(file)
    assert fault in str(error.value)


def test_missing_configuration_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--config-file .*none\.yaml"):
        read_config(tmp_path / "none.yaml")


def test_help_shows_every_setting_and_no_flag_without_effect():
    shown = CliRunner().invoke(cli, ["run", "--help"]).output.split()
    assert [setting.option for setting in SETTINGS if setting.option not in shown] == []
    assert [option for option in IGNORED if option in shown] == []


def test_arguments_for_mpiexec_and_binding_add_up(asked):
    options, _ = asked("--mpi-args", "-a 'b c'", "--binding-args", "--bind-to core")
    assert options.mpi_args == ("-a", "b c", "--bind-to", "core")


def test_version_needs_no_ranks():
    assert "0.1" in CliRunner().invoke(cli, ["run", "--version"]).output


def test_check_build_needs_no_ranks():
    shown = CliRunner().invoke(cli, ["run", "--check-build"])
    assert shown.exit_code == 0
    assert "[X] PyTorch" in shown.output
    assert "[ ] NCCL, for tensors on GPUs" in shown.output
