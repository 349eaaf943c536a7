"""What the engine keeps from one step to the next: residuals, measured errors, raised bits."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, NonFiniteGradientError, UsageError
from tests.engine.ranks import on_ranks

TWO = _core.CodecSpec(bits=2, contract=True, bucket_size=64)
SIGN = _core.CodecSpec(scheme="sign", bits=1, bucket_size=64)
COUNT = 1000  # not a multiple of the bucket, nor of it times the ranks


def gradient(rank: int, step: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(1000 * step + rank).standard_normal(count).astype(np.float32)


def run_steps(me, steps, op="average", coding=TWO, **more):
    """Return the sum of the results of some steps."""
    total = np.zeros(COUNT)
    for step in steps:
        x = gradient(me.rank, step)
        me.allreduce("w", x, op, coding, error_feedback=True, **more).wait()
        total += x
    return total


def exact_sum(ranks, steps, op="average"):
    total = sum(gradient(r, s).astype(np.float64) for r in range(ranks) for s in steps)
    return total / ranks if op == "average" else total


def owed(shares):
    """What the ranks' shares add up to."""
    return sum(share.astype(np.float64) for share in shares)


@pytest.mark.parametrize("coding", [TWO, SIGN, _core.CodecSpec(bits=8)])
@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_and_what_is_owed_add_up_to_the_gradients(ranks, op, coding):
    def program(me):
        return run_steps(me, range(12), op, coding), me.engine.owed_share("w")

    results = on_ranks(ranks, program)
    sent, rest = results[0][0], owed(share for _, share in results)
    exact = exact_sum(ranks, range(12), op)
    assert np.abs(rest).max() > 1e-3  # something was lost on the way, or nothing is tested
    assert np.allclose(sent + rest, exact, atol=1e-4 * ranks)


def test_what_is_owed_adds_up_where_many_nodes_exchange_in_two_dimensions():
    ranks, count = 132, 66 * 64 * 2 + 7  # two ranks of a node; more buckets than nodes

    def program(me):
        total = np.zeros(count)
        for step in range(3):
            x = gradient(me.rank, step, count)
            me.allreduce("w", x, "average", TWO, error_feedback=True).wait()
            total += x
        return total, me.engine.owed_share("w")

    results = on_ranks(ranks, program, ranks_per_node=2)
    exact = sum(gradient(r, s, count).astype(np.float64) for r in range(ranks) for s in range(3))
    rest = owed(share for _, share in results)
    assert np.abs(rest).max() > 1e-3
    assert np.allclose(results[0][0] + rest, exact / ranks, atol=1e-3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_feedback_keeps_weights_without_a_gradient_near_where_they_are(ranks):
    """One bit sends such an element as plus or minus its bucket's mean magnitude."""
    steps = 200

    def program(me, feedback):
        total = np.zeros(COUNT)
        for step in range(steps):
            x = gradient(me.rank, step)
            x[::3] = 0
            me.allreduce("w", x, "average", SIGN, error_feedback=feedback).wait()
            total += x
        return np.abs(total[::3]).max()

    near, far = (on_ranks(ranks, lambda me, on=on: program(me, on))[0] for on in (True, False))
    assert 0 < near < 5  # of mean magnitudes, which are below 0.54: however many the steps
    assert far > steps / 4


@pytest.mark.parametrize("algorithm", ["auto", "leaders_sra"])
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (3, 2), (6, 3)])
def test_they_add_up_where_only_messages_across_nodes_are_coded(ranks, ranks_per_node, algorithm):
    """A rank codes other elements then than where all exchange with all."""

    def program(me):
        return run_steps(me, range(6), coding=SIGN), me.engine.owed_share("w")

    results = on_ranks(ranks, program, ranks_per_node=ranks_per_node, algorithm=algorithm)
    sent, rest = results[0][0], owed(share for _, share in results)
    assert np.abs(rest).max() > 1e-3
    assert np.allclose(sent + rest, exact_sum(ranks, range(6)), atol=1e-4 * ranks)


def test_scales_are_those_of_the_result():
    def program(me):
        total = run_steps(me, range(5), "sum", prescale=0.5, postscale=3.0)
        return total, me.engine.owed_share("w")

    results = on_ranks(3, program)
    exact = 1.5 * exact_sum(3, range(5), "sum")
    assert np.allclose(results[0][0] + owed(share for _, share in results), exact, atol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_what_is_owed_is_paid_on_another_number_of_ranks(op, before, after):
    results = on_ranks(before, lambda me: (run_steps(me, range(8), op), me.engine.owed_share("w")))
    saved = owed(share for _, share in results).astype(np.float32)

    def go_on(me):
        me.engine.restore_owed({"w": saved})
        assert me.engine.owed_counts() == {"w": COUNT}
        total = run_steps(me, range(8, 16), op)
        return total, me.engine.owed_share("w")

    later = on_ranks(after, go_on)
    rest = owed(share for _, share in later) if after > 1 else 0
    sent = results[0][0] + later[0][0]
    exact = exact_sum(before, range(8), op) + exact_sum(after, range(8, 16), op)
    assert np.allclose(sent + rest, exact, atol=2e-3)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(3, None), (4, 2), (3, 2), (6, 3)])
def test_what_was_restored_is_paid_with_the_first_step(ranks, ranks_per_node):
    """Not only kept: all of it, whichever ranks code it."""
    state = gradient(9, 9)

    def program(me):
        me.engine.restore_owed({"w": state})
        x = np.zeros(COUNT, dtype=np.float32)
        coding = _core.CodecSpec(bits=8, bucket_size=64)
        me.allreduce("w", x, "average", coding, error_feedback=True).wait()
        return x

    for paid in on_ranks(ranks, program, ranks_per_node=ranks_per_node):
        assert np.allclose(paid, state, atol=0.1)


ALGORITHMS = [
    *("sra", "sra2d", "allgather", "requantizing_ring"),
    *("hierarchical_sra", "leaders_sra"),
]


@pytest.mark.parametrize("after", ALGORITHMS)
@pytest.mark.parametrize("before", ALGORITHMS)
def test_what_is_owed_is_paid_whatever_algorithms_follow_one_another(before, after):
    steps, four = 5, _core.CodecSpec(bits=4, contract=True, bucket_size=64)

    def program(me):
        if me.rank == 0:
            me.engine.tune(algorithm=before)
        me.barrier("before").wait()
        total = run_steps(me, range(steps), coding=four)
        first = me.engine.owed_share("w")
        if me.rank == 0:
            me.engine.tune(algorithm=after)
        me.barrier("after").wait()
        x = np.zeros(COUNT, dtype=np.float32)
        for _ in range(30):
            x[:] = 0
            me.allreduce("w", x, "average", four, error_feedback=True).wait()
            total += x
        return total, first, me.engine.owed_share("w")

    results = on_ranks(4, program, ranks_per_node=2)
    first, rest = (owed(each[i] for each in results) for i in (1, 2))
    assert np.abs(first).max() > 1e-2 and np.abs(rest).max() < 1e-3
    assert np.allclose(results[0][0] + rest, exact_sum(4, range(steps)), atol=1e-3)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_what_is_owed_does_not_change_operations_that_do_not_add(op):
    def program(me):
        run_steps(me, range(3))
        before = me.engine.owed_share("w")
        x = gradient(0, 3)
        me.allreduce("w", x, op).wait()
        return x, np.array_equal(before, me.engine.owed_share("w"))

    same = gradient(0, 3)
    for x, kept in on_ranks(2, program):
        assert np.allclose(x, same * same if op == "product" else same)
        assert kept


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_a_sum_beyond_float16_raises_on_every_rank(ranks_per_node):
    """Every rank's values and every node's sum are finite; that of all is not."""

    def program(me):
        x = np.full(COUNT, 20_000, dtype=np.float16)
        me.allreduce("w", x, "sum", _core.CodecSpec(bits=8), check_finite=True).wait()

    for fault in on_ranks(4, program, ranks_per_node=ranks_per_node):
        assert isinstance(fault, NonFiniteGradientError)
        assert "overflowed" in str(fault)


def test_a_restored_state_that_is_not_used_is_saved_again():
    state = np.arange(COUNT, dtype=np.float32)

    def program(me):
        me.engine.restore_owed({"w": state})
        return me.engine.owed_share("w")

    assert np.array_equal(owed(on_ranks(3, program)), state)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_tensor_no_longer_compressed_is_paid_at_once(dtype):
    def program(me):
        total = run_steps(me, range(5))
        x = gradient(me.rank, 5).astype(dtype)
        me.allreduce("w", x, "average").wait()
        assert me.engine.owed_counts() == {}
        return total + x

    tolerance = 1e-2 if dtype is np.float16 else 1e-4
    for total in on_ranks(3, program):
        assert np.allclose(total, exact_sum(3, range(6)), atol=tolerance)


def test_another_bucket_or_scale_moves_what_is_owed():
    wide = _core.CodecSpec(bits=2, contract=True, bucket_size=256)

    def program(me):
        total = run_steps(me, range(4)) + run_steps(me, range(4, 6), coding=wide)
        total += run_steps(me, range(6, 8), coding=wide, postscale=2.0)
        return total, me.engine.owed_share("w")

    results = on_ranks(3, program)
    exact = exact_sum(3, range(6)) + 2 * exact_sum(3, range(6, 8))
    assert np.allclose(results[0][0] + owed(share for _, share in results), exact, atol=1e-3)


@pytest.mark.full
def test_names_that_are_new_in_every_step_are_warned_of_once():
    said = []

    def program(me):
        for step in range(170):
            xs = [np.ones(1, np.float32) for _ in range(100)]
            handles = [
                me.allreduce(f"w.{step}.{i}", x, "sum", TWO, error_feedback=True)
                for i, x in enumerate(xs)
            ]
            for handle in handles:
                handle.wait()
        return len(me.engine.owed_counts())

    assert on_ranks(2, program, log=said.append) == [17000] * 2
    told = [line for line in said if "a fixed name" in line]
    assert len(told) == 1, said
    assert "kept for 16384 tensors" in told[0]


def test_another_shape_drops_what_is_owed_and_says_so_once():
    said = []

    def program(me):
        run_steps(me, range(2))
        for count in (70, 90, 70):
            x = np.ones(count, np.float32)
            me.allreduce("w", x, "average", TWO, error_feedback=True).wait()
        return me.engine.owed_counts()

    assert on_ranks(2, program, log=said.append) == [{"w": 70}] * 2
    for rank in range(2):
        (line,) = [each for each in said if each.startswith(f"rank {rank}: ")]
        assert "'w' now has 70 elements" in line
        assert str(COUNT) in line


def test_nan_does_not_live_on_in_what_is_owed():
    def program(me):
        x = gradient(me.rank, 0)
        x[500] = np.nan if me.rank == 0 else 1
        with pytest.raises(NonFiniteGradientError):
            me.allreduce("w", x, "average", TWO, True, error_feedback=True).wait()
        return run_steps(me, range(3))

    for total in on_ranks(2, program):
        assert np.isfinite(total).all()


def test_state_is_refused_while_operations_are_under_way():
    def program(me):
        if me.rank == 0:
            handle = me.allreduce("late", np.ones(3, np.float32))
            with pytest.raises(UsageError, match=r"'late' among them.*wait for their handles"):
                me.engine.owed_counts()
            me.allreduce("go", np.ones(3, np.float32)).wait()
            handle.wait()
        else:
            me.allreduce("go", np.ones(3, np.float32)).wait()
            me.allreduce("late", np.ones(3, np.float32)).wait()

    assert on_ranks(2, program) == [None, None]


@pytest.mark.parametrize("change", [{"error_feedback": True}, {"nmse_budget": 0.5}])
def test_ranks_must_agree_on_feedback_and_budget(change):
    def program(me):
        more = change if me.rank else {}
        me.allreduce("w", gradient(me.rank, 0), "sum", TWO, **more).wait()

    for error in on_ranks(2, program):
        assert isinstance(error, HorovodInternalError)
        assert "with error feedback" in str(error) or "NMSE budget 0.5" in str(error)


def quality_after(steps, size=2, coding=TWO, **more):
    def program(me):
        for step in range(steps):
            x = gradient(me.rank, step)
            me.allreduce("w", x, "average", coding, **more).wait()
        return me.engine.quality()

    return [quality["w"] for quality in on_ranks(size, program)]


def test_quality_tells_error_bits_and_bytes_of_each_tensor():
    for w in quality_after(3, coding=_core.CodecSpec(bits=4)):
        assert w["bits"] == 4
        assert w["elements"] == COUNT
        assert w["wire_bytes"] == 2 * 4 + 1024 // 2
        assert w["reductions"] == 3
        # QSGD.md: w is about .036 for Gaussians at 4 bits and bucket 512; the sums are coded too.
        assert 0.01 < w["nmse"] < 0.08
        assert 0.01 < w["mean_nmse"] < 0.08


@pytest.mark.parametrize(("budget", "bits"), [(2.0, 2), (0.2, 4), (1e-3, 8), (1e-9, 32)])
def test_bits_are_raised_until_the_error_is_within_the_budget(budget, bits):
    said = []

    def program(me):
        for step in range(6):
            x = gradient(me.rank, step)
            me.allreduce("w", x, "average", TWO, nmse_budget=budget, error_feedback=True).wait()
        return me.engine.quality()["w"], me.engine.owed_counts()

    for quality, counts in on_ranks(3, program, log=said.append):
        assert quality["bits"] == bits
        assert quality["nmse"] <= budget
        assert (counts == {}) == (bits == 32)  # what was owed is paid with the first exact step
    raises = [2, 4, 8, 32].index(bits)
    assert len(said) == raises
    for line, code in zip(said, ["qsgd(bits=4", "qsgd(bits=8", "float32"], strict=False):
        assert f"exceeds the budget of {budget:.3g}; it is sent as {code}" in line


def test_a_new_request_takes_the_place_of_what_was_raised():
    def program(me):
        for _ in range(3):
            me.allreduce("w", gradient(me.rank, 0), "sum", TWO, nmse_budget=0.1).wait()
        raised = me.engine.quality()["w"]["bits"]
        eight = _core.CodecSpec(bits=8)
        me.allreduce("w", gradient(me.rank, 0), "sum", eight, nmse_budget=0.1).wait()
        return raised, me.engine.quality()["w"]["bits"]

    assert on_ranks(2, program) == [(4, 8)] * 2


def test_integers_and_maxima_cannot_be_compressed():
    def program(me):
        me.allreduce("w", np.ones(100, np.int32), coding=TWO)

    assert "floating types" in str(on_ranks(1, program)[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floating_types_are_compressed_too(dtype):
    def program(me):
        x = gradient(me.rank, 0).astype(dtype)
        me.allreduce("w", x, "average", _core.CodecSpec(bits=8)).wait()
        return x

    a, b = on_ranks(2, program)
    exact = exact_sum(2, range(1))
    assert np.array_equal(a, b)
    assert 0 < np.square(a - exact).sum() / np.square(exact).sum() < 2e-3


@pytest.mark.parametrize("algorithm", ["ring", "sra", "allgather", "requantizing_ring"])
def test_an_algorithm_is_used_for_what_it_can_reduce(algorithm):
    def program(me):
        exact, coded = gradient(me.rank, 0), gradient(me.rank, 0)
        me.allreduce("exact", exact, "average").wait()
        me.allreduce("coded", coded, "average", _core.CodecSpec(bits=8)).wait()
        return exact, coded

    expected = exact_sum(3, range(1))
    for exact, coded in on_ranks(3, program, algorithm=algorithm, threads=2):
        assert np.allclose(exact, expected, atol=1e-5)
        assert 0 < np.square(coded - expected).sum() / np.square(expected).sum() < 5e-3


@pytest.mark.full
def test_the_planner_declines_what_would_not_save_time_and_says_why():
    """On a machine where coding an element takes longer than sending it."""
    machine = _core.Machine(ranks=3, across=(1e-5, 1e-10), codecs=[(TWO, 1e-6, 1e-6, 1e-6)])
    said = []

    def program(me):
        for _ in range(2):
            x = gradient(me.rank, 0, 64)
            me.allreduce("tiny", x, "sum", TWO, error_feedback=True).wait()
        return x, me.engine.quality()["tiny"]

    exact = sum(gradient(r, 0, 64) for r in range(3))
    for x, quality in on_ranks(3, program, machine=machine, planner="on", log=said.append):
        assert np.allclose(x, exact, atol=1e-5)
        assert quality["coding"] == "none"
    assert len(said) == 1
    assert said[0].startswith("planner: with qsgd(bits=2")
    assert ", 64 elements are sent as float32: " in said[0]
