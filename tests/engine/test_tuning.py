"""What changes while a job runs, and what ends it when it stands still."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import RankFailedError, UsageError
from tests.engine.ranks import on_ranks
from tests.engine.test_feedback import COUNT, TWO, exact_sum, gradient, owed


def reductions(me):
    return me.engine.stats()["fused_reductions"]


def reduce_many(me, step):
    handles = [me.allreduce(f"t{i}.{step}", np.ones(100, np.float32)) for i in range(20)]
    for handle in handles:
        handle.wait()


def test_a_cycle_lets_more_tensors_travel_together():
    def program(me):
        for i in range(20):
            x = np.ones(100, np.float32)
            handle = me.allreduce(f"t{i}", x)
            time.sleep(0.002)
        handle.wait()
        return x[0], reductions(me)

    for value, fused in on_ranks(2, program, cycle_time_s=0.3):
        assert value == 2
        assert fused <= 2


def test_coded_and_exact_gradients_in_turns_take_two_reductions():
    def program(me):
        codings = [TWO if i % 2 else None for i in range(20)]
        handles = [
            me.allreduce(f"t{i}", np.ones(COUNT, np.float32), coding=coding)
            for i, coding in enumerate(codings)
        ]
        for handle in handles:
            handle.wait()
        return reductions(me)

    assert on_ranks(2, program, cycle_time_s=0.5) == [2, 2]


@pytest.mark.parametrize("ranks_per_node", (None, 2))
def test_gradients_of_several_codes_take_one_reduction(ranks_per_node):
    """And each has the values that it has alone."""
    codings = [
        _core.CodecSpec(bits=2 + i % 3 * 3, bucket_size=(64, 512, 4096)[i % 3]) for i in range(12)
    ]

    def inputs(me):
        return np.random.default_rng(me.rank).standard_normal((12, 3000)).astype("f4")

    def together(me):
        xs = inputs(me)
        handles = [
            me.allreduce(f"t{i}", x, coding=coding, group="all", group_size=12)
            for i, (x, coding) in enumerate(zip(xs, codings, strict=True))
        ]
        for handle in handles:
            handle.wait()
        qualities = me.engine.quality()
        bits = [qualities[f"t{i}"]["bits"] for i in range(12)]
        return xs.tobytes(), reductions(me), bits == [coding.bits for coding in codings]

    def alone(me):
        xs = inputs(me)
        for i, x in enumerate(xs):
            me.allreduce(f"t{i}", x, coding=codings[i]).wait()
        return xs.tobytes(), reductions(me), True

    options = {"ranks_per_node": ranks_per_node}
    one_by_one = on_ranks(4, alone, **options)
    fused = on_ranks(4, together, **options)
    assert [count for _, count, _ in one_by_one] == [12] * 4
    assert [(count, right) for _, count, right in fused] == [(1, True)] * 4
    assert {values for values, _, _ in fused} == {values for values, _, _ in one_by_one}


def test_fusion_size_and_cycle_can_be_tuned():
    def program(me):
        counts = []
        for fusion in (0, 64 << 20):
            if me.rank == 0:
                me.engine.tune(fusion_bytes=fusion, cycle_time_s=0.1)
            me.barrier(f"tuned.{fusion}").wait()
            before = reductions(me)
            reduce_many(me, fusion)
            counts.append(reductions(me) - before)
        return counts

    for alone, together in on_ranks(2, program):
        assert alone == 20
        assert together <= 2


@pytest.mark.parametrize("op", ["sum", "average"])
def test_algorithm_and_bits_change_on_all_ranks_and_owe_nothing_less(op):
    """Two nodes of two ranks: the algorithms cut what is owed differently."""
    plan = [
        *(("sra", 8), ("hierarchical_sra", 8), ("leaders_sra", 8), ("auto", 2)),
        *(("leaders_sra", 4), ("sra2d", 4), ("sra", 32), ("sra", 4)),
    ]

    def program(me):
        total, bits = np.zeros(COUNT), []
        for step, (algorithm, width) in enumerate(plan):
            if me.rank == 0:
                me.engine.tune(algorithm=algorithm, bits=width)
            me.barrier(f"tuned.{step}").wait()
            x = gradient(me.rank, step)
            me.allreduce("w", x, op, TWO, error_feedback=True).wait()
            total += x
            bits.append(me.engine.quality()["w"]["bits"])
        return total, bits, me.engine.owed_share("w")

    results = on_ranks(4, program, ranks_per_node=2)
    assert len({total.tobytes() for total, _, _ in results}) == 1
    for _, bits, _ in results:
        assert [round(b) for b in bits] == [width for _, width in plan]
    rest = owed(share for _, _, share in results)
    exact = exact_sum(4, range(len(plan)), op)
    assert np.allclose(results[0][0] + rest, exact, atol=2e-3)


@pytest.mark.parametrize("algorithm", ["sra", "sra2d", "allgather", "requantizing_ring"])
def test_the_segments_of_messages_change_no_bit_of_a_result(algorithm):
    count, nearest = 200_000, _core.CodecSpec(bits=4, rounding="nearest")

    def program(me):
        found, bytes_sent = [], []
        for segment in (0, 1 << 12, 1 << 15, 1 << 30):
            if me.rank == 0:
                me.engine.tune(algorithm=algorithm, segment_elements=segment)
            me.barrier(f"tuned.{segment}").wait()
            before = me.engine.stats()["wire_bytes"]
            x = np.random.default_rng(me.rank).standard_normal(count).astype(np.float32)
            me.allreduce("w", x, coding=nearest).wait()
            found.append(x.tobytes())
            bytes_sent.append(me.engine.stats()["wire_bytes"] - before)
        return found, bytes_sent

    results = on_ranks(4, program)
    assert len({values for found, _ in results for values in found}) == 1
    for _, bytes_sent in results:  # each message has a header
        assert bytes_sent[1] > bytes_sent[2] > bytes_sent[3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"segment_elements": 3000}, "power of two"),
        ({"segment_elements": 1 << 31}, "power of two"),
        ({"bits": 5}, "2, 4, 8 or 32"),
        ({"algorithm": "shared"}, "shared"),
        ({"algorithm": "x"}, "x"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(change, said):
    def program(me):
        if me.rank == 0:
            with pytest.raises(UsageError, match=said):
                me.engine.tune(**change)
        else:
            with pytest.raises(UsageError, match="only rank 0 can"):
                me.engine.tune(bits=4)
        reduce_many(me, 0)
        return True

    assert on_ranks(2, program) == [True, True]


def test_sets_without_rank_0_are_served_while_it_rests():
    def program(me):
        ours = me.add_process_set([1, 2])
        ours.wait()
        start = time.monotonic()
        for i in range(50 if me.rank else 0):
            me.allreduce(f"t{i}", np.ones(3), process_set=ours.result()).wait()
        elapsed = time.monotonic() - start
        me.barrier("end").wait()
        return elapsed

    assert max(on_ranks(3, program)) < 60


def test_a_tensor_that_waits_too_long_ends_the_job_by_name():
    waiting = threading.Event()

    def program(me):
        if me.rank == 1:
            waiting.wait(60)
            me.allreduce("late", np.ones(3)).wait()
        try:
            me.allreduce("late", np.ones(3)).wait()
        finally:
            waiting.set()

    for error in on_ranks(2, program, stall_shutdown_s=0.3):
        assert isinstance(error, RankFailedError)
        assert "tensor 'late' has waited 0 s for rank 1" in str(error)
        assert "QSGD_STALL_SHUTDOWN_S" in str(error)


def test_waiting_to_join_is_no_stall():
    def program(me):
        if me.rank == 1:
            time.sleep(0.8)
        handle = me.join()
        handle.wait()
        return handle.result()

    assert on_ranks(2, program, stall_shutdown_s=0.3, stall_warning_s=0.1) == [1, 1]


def test_config_knows_every_setting():
    _core.EngineConfig(cycle_time_s=0.001, cache_capacity=0, stall_shutdown_s=1.0)
