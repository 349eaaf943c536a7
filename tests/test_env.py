"""The table of variables: Horovod's names are read where QSGD_* says nothing."""

from __future__ import annotations

import pytest

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError


@pytest.mark.parametrize(
    ("variable", "twin", "text", "value"),
    [
        ("QSGD_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD", "1048576", 1 << 20),
        ("QSGD_CYCLE_TIME_MS", "HOROVOD_CYCLE_TIME", "0.5", 0.5),
        ("QSGD_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY", "0", 0),
        ("QSGD_ALGORITHM", "HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "hierarchical"),
        ("QSGD_ALGORITHM", "HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "auto"),
        ("QSGD_AUTOTUNE", "HOROVOD_AUTOTUNE", "true", True),
        ("QSGD_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_LOG", "a.csv", "a.csv"),
        ("QSGD_TIMELINE", "HOROVOD_TIMELINE", "t.json", "t.json"),
        ("QSGD_TIMELINE", "HOROVOD_TIMELINE", "DYNAMIC", None),
        ("QSGD_STALL_WARNING_S", "HOROVOD_STALL_CHECK_TIME_SECONDS", "7", 7.0),
        ("QSGD_STALL_WARNING_S", "HOROVOD_STALL_CHECK_DISABLE", "1", 0.0),
        ("QSGD_STALL_WARNING_S", "HOROVOD_STALL_CHECK_DISABLE", "0", 60.0),
        ("QSGD_STALL_SHUTDOWN_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", 90.0),
        ("QSGD_DYNAMIC_PROCESS_SETS", "HOROVOD_DYNAMIC_PROCESS_SETS", "1", True),
        ("QSGD_LOG_LEVEL", "HOROVOD_LOG_LEVEL", "DEBUG", "debug"),
    ],
)
def test_horovods_variable_sets_the_same_thing(variable, twin, text, value):
    assert env.get(variable, {twin: text}) == value
    assert env.is_set(variable, {twin: text})


@pytest.mark.parametrize("text", ["3000", "1", "-2", "2147483648", "64k"])
def test_segments_are_powers_of_two(text):
    assert env.get("QSGD_SEGMENT_ELEMENTS", {"QSGD_SEGMENT_ELEMENTS": "65536"}) == 65536
    assert env.get("QSGD_SEGMENT_ELEMENTS", {}) == 0
    with pytest.raises(UsageError, match="power of two"):
        env.get("QSGD_SEGMENT_ELEMENTS", {"QSGD_SEGMENT_ELEMENTS": text})


@pytest.mark.parametrize("text", ["100", "0", "-64", "65600", "64k"])
def test_a_bucket_is_a_multiple_of_64(text):
    assert env.get("QSGD_BUCKET_SIZE", {"QSGD_BUCKET_SIZE": "1024"}) == 1024
    with pytest.raises(UsageError, match="multiple of 64"):
        env.get("QSGD_BUCKET_SIZE", {"QSGD_BUCKET_SIZE": text})


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("QSGD_THREADS", "100000", "below 1025"),
        ("QSGD_FAN_OUT", "99999999999", "below 2147483648"),
        ("QSGD_SEED", "1" + 20 * "0", "below 2\\^63"),
    ],
)
def test_numbers_that_the_core_cannot_use_are_refused(name, text, limit):
    with pytest.raises(UsageError, match=f"{name}='{text}': .* {limit}"):
        env.get(name, {name: text})


def test_misspelt_names_are_found_and_a_users_own_are_not():
    given = {"QSGD_BIT": "4", "QSGD_ERRORFEEDBACK": "on", "QSGD_BITS": "4", "QSGD_GPU": "none"}
    own = {"QSGD_EXPERIMENT": "7", "QSGD_TASK": "1", "BITS": "4"}
    assert env.misspelt({**given, **own}) == {
        "QSGD_BIT": "QSGD_BITS",
        "QSGD_ERRORFEEDBACK": "QSGD_ERROR_FEEDBACK",
    }
    assert env.unknown({**given, **own}) == [
        "QSGD_BIT", "QSGD_ERRORFEEDBACK", "QSGD_EXPERIMENT", "QSGD_TASK",
    ]  # fmt: skip


def test_own_variable_wins_over_its_twin():
    both = {"QSGD_CYCLE_TIME_MS": "2", "HOROVOD_CYCLE_TIME": "1"}
    assert env.get("QSGD_CYCLE_TIME_MS", both) == 2.0


def test_disabled_stall_check_wins_over_its_times():
    both = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    assert env.get("QSGD_STALL_SHUTDOWN_S", both) == 0.0


def test_empty_twin_is_unset():
    assert env.get("QSGD_CYCLE_TIME_MS", {"HOROVOD_CYCLE_TIME": ""}) == 0.0
    assert not env.is_set("QSGD_CYCLE_TIME_MS", {"HOROVOD_CYCLE_TIME": ""})


def test_error_names_the_variable_that_was_read():
    with pytest.raises(UsageError, match=r"^HOROVOD_AUTOTUNE='maybe'.*1, 0.* sets QSGD_AUTOTUNE\."):
        env.get("QSGD_AUTOTUNE", {"HOROVOD_AUTOTUNE": "maybe"})
    with pytest.raises(UsageError, match=r"^QSGD_AUTOTUNE='maybe'"):
        env.get("QSGD_AUTOTUNE", {"QSGD_AUTOTUNE": "maybe", "HOROVOD_AUTOTUNE": "1"})


def test_log_level_that_is_none_is_refused():
    with pytest.raises(UsageError, match=r"QSGD_LOG_LEVEL='loud'.*trace, debug"):
        env.get("QSGD_LOG_LEVEL", {"QSGD_LOG_LEVEL": "loud"})
