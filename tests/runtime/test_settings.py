"""What the environment says arrives in the core, in the core's units."""

from __future__ import annotations

from array import array

import pytest

from qsgd_hpc import _core, env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import job_settings


@pytest.fixture
def configured(monkeypatch):
    """Return configured(**variables): the arguments that the core's EngineConfig gets."""
    given = {}
    monkeypatch.setattr(_core, "EngineConfig", lambda **arguments: given.update(arguments))
    for name, row in env.TABLE.items():
        for each in (name, *(twin.name for twin in row.twins)):
            monkeypatch.delenv(each, raising=False)

    def build(shares_memory: bool = True, **variables: str) -> dict[str, object]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        job_settings.engine_config(job_settings.read(), shares_memory=shares_memory)
        return given

    return build


def test_milliseconds_of_horovod_become_seconds(configured):
    config = configured(HOROVOD_CYCLE_TIME="2.5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="90")
    assert config["cycle_time_s"] == 0.0025
    assert config["stall_shutdown_s"] == 90.0
    assert config["stall_warning_s"] == 60.0


def test_a_capacity_of_0_turns_the_cache_off(configured):
    assert configured(HOROVOD_CACHE_CAPACITY="0")["cache_capacity"] == 0


@pytest.mark.parametrize(
    ("variables", "algorithm"),
    [({}, "auto"), ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "hierarchical"),
     ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, "auto"),
     ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "QSGD_ALGORITHM": "ring"}, "ring")],
)  # fmt: skip
def test_hierarchical_allreduce_gives_way_to_a_named_algorithm(configured, variables, algorithm):
    assert configured(**variables)["algorithm"] == algorithm


def test_nothing_is_reduced_within_nodes_that_share_no_memory(configured):
    config = configured(shares_memory=False, HOROVOD_HIERARCHICAL_ALLREDUCE="1")
    assert config["algorithm"] == "auto"
    config = configured(shares_memory=False, QSGD_ALGORITHM="ring")
    assert config["algorithm"] == "ring"


@pytest.mark.parametrize(("level", "heard"), [("trace", True), ("warning", True), ("off", False)])
def test_log_level_decides_whether_warnings_are_heard(configured, level, heard):
    assert (configured(QSGD_LOG_LEVEL=level)["log"] is not None) == heard


class Ranks:
    """A communicator whose ranks have these settings."""

    def __init__(self, *settings: dict[str, object]) -> None:
        self.settings = list(settings)

    def allgather(self, _: object) -> list[dict[str, object]]:
        return self.settings

    def bcast(self, _: object) -> dict[str, object]:
        return self.settings[0]

    def Allreduce(self, _: object, total: array[int]) -> None:
        total[0] = sum(settings != self.settings[0] for settings in self.settings)


def test_settings_that_differ_are_named_with_both_values():
    settings = job_settings.read()
    other = {**settings, "QSGD_CACHE_CAPACITY": 7}
    job_settings.require_equal(Ranks(settings, settings), settings)
    with pytest.raises(UsageError, match="QSGD_CACHE_CAPACITY is 7 on rank 1 and 1024 on rank 0"):
        job_settings.require_equal(Ranks(settings, other), settings)
