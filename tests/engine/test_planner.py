"""What the engine makes of a machine that it knows or measures: bits, remarks, algorithms."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, UsageError
from tests.engine.ranks import on_ranks

EIGHT = _core.CodecSpec(bits=8)
FOUR = _core.CodecSpec(bits=4)
LARGE, SMALL = 1 << 18, 64
SLOW_S_PER_BYTE = 1e-8  # 100 MB/s


def a_machine(
    s_per_byte=SLOW_S_PER_BYTE, coding_s=1e-10, four_s=None, eden_s=None, observed=(), ranks=3
):
    """Return one whose messages take 10 us, and coding so long per element."""
    costs = [(EIGHT, *[coding_s] * 3), (FOUR, *[four_s or coding_s] * 3)]
    if eden_s is not None:
        costs += [(_core.CodecSpec(scheme="eden", bits=b), *[eden_s] * 3) for b in (4, 3)]
    return _core.Machine(
        ranks=ranks, across=(1e-5, s_per_byte), codecs=costs, observed=list(observed)
    )


def predicted_s(machine, count):
    return _core.allreduce_s(machine, algorithm="sra", count=count, coding=EIGHT)


FAST = a_machine(s_per_byte=1e-13, coding_s=1e-9)


def gradient(rank, count=LARGE):
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def reduce(me, name="w", count=LARGE, coding=EIGHT, **more):
    x = gradient(me.rank, count)
    me.allreduce(name, x, "sum", coding, **more).wait()
    return x


def is_close(x, exact):
    """Whether x is the sum but for what 4 bits lose."""
    return np.square(x - exact).sum() < 0.2 * np.square(exact).sum()


def coding_of(me, name="w"):
    return me.engine.quality()[name]["coding"]


def reduced(ranks=3, count=LARGE, **config):
    """Return how a tensor whose bits are open travelled, and what rank 0 said."""
    said = []

    def program(me):
        reduce(me, count=count, auto_bits=True)
        return coding_of(me)

    codings = on_ranks(ranks, program, log=said.append, **config)
    assert len(set(codings)) == 1
    return codings[0], said


@pytest.mark.parametrize("planner", ["off", "advise", "on"])
def test_open_bits_are_four_where_the_wire_is_slow(planner):
    coding, said = reduced(machine=a_machine(), planner=planner)
    assert coding.startswith("qsgd(bits=4,")
    assert len(said) == 1
    assert said[0].startswith(
        f"planner: with bits=auto, {LARGE} elements are sent as {coding}: 4 bit: 1.00 MiB in "
    )


@pytest.mark.parametrize(
    ("count", "machine", "expected", "verdict"),
    [
        (LARGE, FAST, "none", "so fp32, as at 4096 MiB: "),
        (SMALL, a_machine(), "none", "so fp32; compressing pays from "),
        (LARGE, a_machine(four_s=2e-8), "qsgd(bits=8,", "so compress, as from "),
    ],
)
def test_open_bits_are_what_is_fastest(count, machine, expected, verdict):
    coding, said = reduced(count=count, machine=machine)
    assert coding.startswith(expected)
    assert len(said) == 1
    assert verdict in said[0]


def test_each_outcome_is_reported_for_the_tensor_at_hand():
    said = []

    def program(me):
        for count in (SMALL, LARGE, 2 * SMALL, 2 * LARGE):
            reduce(me, str(count), count, auto_bits=True)

    on_ranks(2, program, machine=a_machine(ranks=2), log=said.append)
    small, large = said
    assert small.startswith(f"planner: with bits=auto, {SMALL} elements are sent as float32: ")
    assert large.startswith(f"planner: with bits=auto, {LARGE} elements are sent as qsgd(bits=4")


@pytest.mark.parametrize(
    ("planner", "asked", "code"),
    [("on", {}, "qsgd(bits=8,"), ("off", {"auto_bits": True}, "qsgd(bits=4,")],
    ids=["on", "auto"],
)
def test_measured_times_decide_at_each_size_separately(planner, asked, code):
    """One slow trial among the sizes: the code wins below it and above it."""
    plain, said = a_machine(), []
    trials = [
        ("sra", EIGHT, count, slowdown * predicted_s(plain, count))
        for count, slowdown in [(1 << 10, 1), (1 << 14, 1), (1 << 16, 6), (1 << 20, 1)]
    ]
    expected = {1 << 13: code, 1 << 16: "none", 1 << 18: code}

    def program(me):
        for count in expected:
            reduce(me, str(count), count, **asked)
        return {count: coding_of(me, str(count)) for count in expected}

    machine = a_machine(observed=trials)
    for codings in on_ranks(3, program, machine=machine, planner=planner, log=said.append):
        assert all(codings[count].startswith(start) for count, start in expected.items())
    with_code, without = said
    assert f", {1 << 13} elements are sent as {code}" in with_code
    assert f", {1 << 16} elements are sent as float32: " in without


def test_open_bits_of_a_code_that_loses_less_are_fewer():
    """EDEN's in 3 bits loses what QSGD's does in 4. Coding it is timed; here any time is short."""
    eden = _core.CodecSpec(scheme="eden", bits=8)
    said = []

    def program(me):
        reduce(me, coding=eden, auto_bits=True)
        return coding_of(me)

    machine = a_machine(s_per_byte=1e-6)
    codings = on_ranks(3, program, machine=machine, log=said.append)
    assert [coding.partition(",")[0] for coding in codings] == ["eden(bits=3"] * 3
    assert "with bits=auto, 262144 elements are sent as eden(bits=3" in said[0]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (a_machine(eden_s=1e-10), "eden(bits=3"),
        (a_machine(eden_s=1e-6), "qsgd(bits=4"),
        (a_machine(s_per_byte=1e-13, coding_s=1e-9, eden_s=1e-9), "none"),
    ],
    ids=["slow wire", "slow EDEN", "fast wire"],
)
def test_an_open_code_is_chosen_by_error_and_time(machine, expected):
    said = []

    def program(me):
        reduce(me, auto_bits=True, auto_code=True)
        return coding_of(me)

    codings = on_ranks(3, program, machine=machine, log=said.append)
    assert [coding.partition(",")[0] for coding in codings] == [expected] * 3
    assert len(said) == 1
    assert said[0].count("are sent as " + expected.replace("none", "float32")) == 1


def test_alone_nothing_travels_and_nothing_is_lost():
    def program(me):
        return reduce(me, auto_bits=True), coding_of(me)

    ((x, coding),) = on_ranks(1, program)
    assert coding == "none"
    assert np.array_equal(x, gradient(0))


def test_a_budget_of_the_error_raises_bits_that_were_chosen():
    def program(me):
        codings = []
        for _ in range(3):
            reduce(me, auto_bits=True, nmse_budget=1e-3)
            codings.append(coding_of(me))
        return codings

    for codings in on_ranks(3, program, machine=a_machine(), log=lambda text: None):
        assert [c.partition(",")[0] for c in codings] == ["qsgd(bits=4", *["qsgd(bits=8"] * 2]


@pytest.mark.parametrize("asked", [{"auto_bits": True}, {}], ids=["auto", "on"])
def test_bits_that_would_be_raised_but_cost_time_become_float32_and_the_log_says_so(asked):
    said = []

    def program(me):
        codings = []
        for _ in range(3):
            reduce(me, coding=EIGHT if asked else FOUR, nmse_budget=1e-3, **asked)
            codings.append(coding_of(me))
        return codings

    slow_eight = a_machine(coding_s=1e-6, four_s=1e-10)
    planner = "off" if asked else "on"
    for codings in on_ranks(3, program, machine=slow_eight, planner=planner, log=said.append):
        assert [c.partition(",")[0] for c in codings] == ["qsgd(bits=4", "none", "none"]
    (raised,) = (line for line in said if "exceeds the budget" in line)
    assert raised.endswith("it is sent as float32 from now on")


def test_ranks_that_leave_bits_open_and_ranks_that_do_not_disagree():
    def program(me):
        reduce(me, auto_bits=me.rank == 0)

    for error in on_ranks(2, program):
        assert isinstance(error, HorovodInternalError)
        assert "qsgd(bits=8, norm=max, bucket_size=512) or fewer bits (auto)" in str(error)
        assert "compress alike" in str(error)


def test_a_code_without_a_choice_has_no_open_bits():
    def program(me):
        reduce(me, coding=_core.CodecSpec(scheme="terngrad", bits=2), auto_bits=True)

    (error,) = on_ranks(1, program)
    assert isinstance(error, UsageError)
    assert "no choice of bits" in str(error)


@pytest.mark.parametrize(
    ("planner", "now"),
    [
        ("off", True),
        ("advise", False),
        pytest.param("off", False, marks=pytest.mark.full),
        pytest.param("advise", True, marks=pytest.mark.full),
    ],
)
def test_the_machine_is_measured_when_a_code_is_first_asked_for(planner, now):
    """And only then: once, on all ranks, and its bytes are not the program's."""
    measured = []
    count = 4096

    def program(me):
        plain = reduce(me, "plain", count, None, now=now)
        before = me.engine.machine()
        coded = reduce(me, "w", count, EIGHT, auto_bits=planner == "off", now=now)
        reduce(me, "v", count, EIGHT, auto_bits=planner == "off", now=now)
        return plain, before, coded, me.engine.machine(), me.engine.stats()

    results = on_ranks(3, program, planner=planner, measured=measured.append)
    exact = sum(gradient(rank, count) for rank in range(3))
    assert len(measured) == 1
    assert measured[0].ranks == 3
    assert measured[0].observed
    for plain, before, coded, machine, stats in results:
        assert np.allclose(plain, exact, atol=1e-5)
        assert is_close(coded, exact)
        assert before is None
        assert machine.observed == measured[0].observed
        assert 4 * count < stats["wire_bytes"] < 100 * count


def test_nothing_is_measured_for_what_is_not_compressed():
    measured = []

    def program(me):
        reduce(me, coding=None)
        return me.engine.machine()

    assert on_ranks(2, program, planner="advise", measured=measured.append) == [None, None]
    assert measured == []


@pytest.mark.full
def test_what_waits_for_the_measurement_is_done_before_the_engine_ends():
    def program(me):
        x = gradient(me.rank)
        handle = me.allreduce("w", x, "sum", EIGHT, auto_bits=True)
        me.engine.shutdown("the program ended")
        handle.wait()
        return x

    exact = gradient(0) + gradient(1)
    for x in on_ranks(2, program, planner="advise"):
        assert is_close(x, exact)


@pytest.mark.full
def test_a_group_waits_for_the_measurement_together():
    def program(me):
        xs = [gradient(me.rank), gradient(me.rank, SMALL)]
        coded = me.allreduce("a", xs[0], "sum", EIGHT, auto_bits=True, group="g", group_size=2)
        plain = me.allreduce("b", xs[1], "sum", None, group="g", group_size=2)
        coded.wait()
        plain.wait()
        return xs

    for large, small in on_ranks(2, program, planner="advise"):
        assert np.allclose(small, gradient(0, SMALL) + gradient(1, SMALL), atol=1e-5)
        assert is_close(large, gradient(0) + gradient(1))


def test_a_set_of_some_ranks_does_not_wait_for_the_others():
    """They may sleep: until the job's machine is known, open bits are the most."""

    def program(me):
        added = me.add_process_set([1, 2])
        added.wait()
        if me.rank == 0:
            return None
        reduce(me, auto_bits=True, process_set=added.result())
        return me.engine.machine()

    assert on_ranks(3, program, planner="advise") == [None] * 3


def remarks(machine, reductions, planner="advise", coding=FOUR):
    said = []

    def program(me):
        for _ in range(reductions):
            reduce(me, coding=coding)
        return coding_of(me)

    codings = on_ranks(3, program, machine=machine, planner=planner, log=said.append)
    return said, codings


def test_bits_given_by_hand_are_obeyed_and_remarked_upon_once():
    said, codings = remarks(FAST, 40)
    assert all(coding.startswith("qsgd(bits=4,") for coding in codings)
    assert len(said) == 1
    assert "qsgd(bits=4, norm=max, bucket_size=512) is used as asked, but costs time" in said[0]
    assert "of 1.00 MiB each on average" in said[0]
    assert "QSGD_PLANNER=on" in said[0]


@pytest.mark.parametrize(
    ("machine", "reductions", "planner"),
    [(a_machine(), 40, "advise"), (FAST, 40, "off"), (FAST, 15, "advise")],
)
def test_there_is_no_remark_where_there_is_no_reason(machine, reductions, planner):
    assert remarks(machine, reductions, planner)[0] == []


@pytest.mark.parametrize(
    ("s_per_byte", "kept"),
    [(1e-6, True), (5e-11, False)],  # 1 MB/s; 20 GB/s, at which only the quickest code would pay
)
def test_a_code_of_another_kind_is_timed_before_it_is_judged(s_per_byte, kept):
    """Elias's is serial: as fast as QSGD's codes, it would pay at either rate."""
    coding = _core.CodecSpec(scheme="elias", bits=5)
    machine = a_machine(s_per_byte=s_per_byte, coding_s=1e-13)

    def program(me):
        reduce(me, coding=coding)
        return coding_of(me)

    codings = on_ranks(3, program, machine=machine, planner="on", log=lambda text: None)
    assert [found.startswith("elias(") for found in codings] == [kept] * 3


def algorithms(tmp_path, **config):
    """Return what tensors travelled by: one of the size observed, and one of another."""
    count = 1 << 16
    quick = [("direct", None, count, 1e-2), ("ring", None, count, 1e-3)]
    files = [tmp_path / f"{rank}.json" for rank in range(3)]

    def program(me):
        me.engine.start_timeline(str(files[me.rank]))
        for _ in range(2):
            reduce(me, count=count, coding=None)
        me.engine.stop_timeline()

    on_ranks(3, program, machine=a_machine(observed=quick), **config)
    text = files[0].read_text()
    return {
        event["args"]["algorithm"]
        for event in json.loads(text)
        if "algorithm" in event.get("args", {})
    }


def test_what_travels_alone_goes_by_the_fastest_algorithm(tmp_path):
    assert algorithms(tmp_path, planner="on", fusion_bytes=0) == {"ring"}


@pytest.mark.parametrize(
    "config",
    [
        {"planner": "on"},  # it may be fused, and the bits must not depend on that
        {"planner": "advise", "fusion_bytes": 0},
    ],
)
def test_else_the_algorithm_does_not_depend_on_the_size(tmp_path, config):
    assert algorithms(tmp_path, **config) == {"direct"}


def test_an_algorithm_that_was_asked_for_is_used(tmp_path):
    found = algorithms(tmp_path, planner="on", fusion_bytes=0, algorithm="rabenseifner")
    assert found == {"rabenseifner"}


@pytest.mark.full
def test_a_fault_of_the_callback_ends_nothing(monkeypatch):
    """It writes to a disk that may be full."""
    reported = threading.Event()
    monkeypatch.setattr("sys.unraisablehook", lambda _: reported.set())

    def fail(machine):
        raise OSError("no space left")

    exact = gradient(0) + gradient(1)
    for x in on_ranks(2, reduce, planner="advise", measured=fail):
        assert is_close(x, exact)
    assert reported.is_set()
