"""The cost model, the plans made with it, and its measurement among threads."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError

SPECS = {bits: _core.CodecSpec(bits=bits) for bits in (8, 4, 2)}
ALPHA_S, GIGABIT_S = 50e-6, 8e-9  # per message; per byte at 1 Gb/s
CODEC_S = 0.1e-9
MI = 1 << 20


def machine(ranks=4, *, alpha_s=ALPHA_S, byte_s=GIGABIT_S, codec_s=CODEC_S, **more):
    costs = [(spec, codec_s, codec_s, codec_s) for spec in SPECS.values()]
    return _core.Machine(ranks=ranks, across=(alpha_s, byte_s), codecs=costs, **more)


def seconds(m, algorithm, count, bits=None):
    coding = None if bits is None else SPECS[bits]
    return _core.allreduce_s(m, algorithm=algorithm, count=count, coding=coding)


def plan(m, count, bits=(4,), **more):
    return _core.plan(m, count=count, codecs=[SPECS[b] for b in bits], **more)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64])
def test_ring_costs_what_the_formula_says(ranks):
    count = 25 * MI
    expected = 2 * (ranks - 1) * ALPHA_S + 2 * (ranks - 1) / ranks * count * 4 * GIGABIT_S
    assert seconds(machine(ranks), "ring", count) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_compressed_wire_time_follows_the_bytes_of_the_code(bits):
    m, count = machine(codec_s=0.0), 25 * MI
    width = (bits + 32 / 512) / 8
    expected = 6 * ALPHA_S + 1.5 * count * width * GIGABIT_S
    assert seconds(m, "sra", count, bits) == pytest.approx(expected, rel=1e-6)


def test_coding_hides_behind_the_wire_but_for_the_first_segment():
    count = 100 * MI
    free, slow = machine(codec_s=0.0), machine(codec_s=0.2e-9)
    extra_s = seconds(slow, "sra", count, 8) - seconds(free, "sra", count, 8)
    assert 0 < extra_s < 0.05 * count * 0.2e-9
    # Where coding takes longer than the wire, the wire hides instead.
    bound = machine(codec_s=100e-9)
    assert seconds(bound, "sra", count, 8) == pytest.approx(count * 2.75 * 100e-9, rel=0.01)


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_doubling_wins_when_small_and_loses_when_large(ranks):
    m = machine(ranks)
    assert seconds(m, "recursive_doubling", 64) <= seconds(m, "ring", 64)
    assert seconds(m, "recursive_doubling", 64 * MI) >= seconds(m, "ring", 64 * MI)
    assert seconds(m, "rabenseifner", 64) <= seconds(m, "ring", 64)


def test_two_dimensions_save_messages_at_many_ranks():
    m = machine(256)
    assert seconds(m, "sra2d", 4096, 4) < seconds(m, "sra", 4096, 4) / 4


@pytest.mark.parametrize(
    ("algorithm", "bits"),
    [
        (name, None if bits is None else bits)
        for name, bits in [
            *((n, None) for n in ("direct", "ring", "recursive_doubling", "rabenseifner")),
            *((n, 4) for n in ("sra", "sra2d", "allgather", "requantizing_ring")),
        ]
    ],
)
def test_costs_grow_with_size(algorithm, bits):
    m = machine(9)
    costs = [seconds(m, algorithm, 1 << k, bits) for k in range(0, 31)]
    assert all(a <= b for a, b in itertools.pairwise(costs))
    assert costs[-1] > costs[0]


def test_hierarchical_sends_one_shard_per_rank_across_nodes():
    m = machine(8, ranks_per_node=4, within=(1e-6, 1e-10), shared=(2e-6, 5e-10))
    count = 16 * MI
    across_s = 2 * ALPHA_S + count / 4 * 4 * GIGABIT_S
    expected = 2e-6 + count * 4 * 5e-10 + across_s
    assert seconds(m, "hierarchical", count) == pytest.approx(expected, rel=1e-9)
    assert seconds(m, "hierarchical_sra", count, 4) < seconds(m, "hierarchical", count)
    sent = _core.wire_bytes(m, algorithm="hierarchical", count=count)
    assert sent == pytest.approx(count)  # 2 (m-1)/m of n/4 elements, 4 bytes each, m = 2


def test_leaders_have_their_nodes_wire_to_themselves():
    m = machine(8, ranks_per_node=4, within=(1e-6, 1e-10), shared=(2e-6, 5e-10))
    count = 16 * MI
    expected = 2e-6 + count * 4 * 5e-10 + 2 * ALPHA_S + count * 4 * GIGABIT_S / 4
    assert seconds(m, "leaders", count) == pytest.approx(expected, rel=1e-9)
    assert seconds(m, "leaders_sra", count, 4) < seconds(m, "leaders", count)
    assert _core.wire_bytes(m, algorithm="leaders", count=count) == pytest.approx(4 * count)


def test_auto_is_what_the_machine_says_at_every_size():
    layout = {"ranks": 8, "ranks_per_node": 4, "exact": "hierarchical", "coded": "hierarchical_sra"}
    m = machine(**layout, within=(1e-6, GIGABIT_S), shared=(1e-6, 1e-10))
    for count in (1, 1000, 10 * MI):
        assert seconds(m, "auto", count) == seconds(m, "hierarchical", count)
        assert seconds(m, "auto", count, 4) == seconds(m, "hierarchical_sra", count, 4)
        chosen = plan(m, count, worth=0.0)
        assert chosen.algorithm == ("hierarchical_sra" if chosen.spec else "hierarchical")


def test_small_messages_are_declined_and_the_reason_has_numbers():
    m = machine(alpha_s=100e-6, byte_s=8e-10, codec_s=1e-9)
    chosen = plan(m, 1024)
    assert chosen.spec is None
    assert chosen.seconds == chosen.exact_seconds
    threshold = _core.plan_threshold(m, SPECS[4])
    assert chosen.reason.startswith("4 bit: 4.00 KiB in ")
    size = f"{threshold * 4 / 1024:.3g} KiB"
    assert chosen.reason.endswith(f"so fp32; compressing pays from {size}")


def test_large_messages_on_a_slow_wire_are_compressed_and_the_reason_has_numbers():
    chosen = plan(machine(), MI)
    assert chosen.spec == SPECS[4]
    assert chosen.seconds < chosen.exact_seconds / 6
    assert "4 bit: 4.00 MiB in " in chosen.reason
    assert ", fp32 50.6 ms, so compress, as from " in chosen.reason
    assert chosen.reason.endswith("KiB on")


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_threshold_is_where_the_verdict_turns(bits):
    m = machine(alpha_s=20e-6, byte_s=1e-9, codec_s=0.5e-9)
    least = _core.plan_threshold(m, SPECS[bits])
    assert plan(m, least, (bits,)).spec == SPECS[bits]
    assert plan(m, least - 1, (bits,)).spec is None


def test_a_wire_faster_than_the_codec_is_never_compressed_for():
    m = machine(byte_s=1e-12)
    assert _core.plan_threshold(m, SPECS[2]) is None
    chosen = plan(m, 64 * MI)
    assert chosen.spec is None
    assert "the wire is too fast for this codec" in chosen.reason


def observed(m, *seen):
    """Return the machine with observations: algorithm, bits, count, and over the form's time."""
    return machine(
        m.ranks,
        byte_s=m.across[1],
        observed=[
            (name, bits and SPECS[bits], count, factor * seconds(m, name, count, bits))
            for name, bits, count, factor in seen
        ],
    )


def test_what_was_observed_is_added_to_the_closed_form_on_straight_lines():
    plain = machine(4)
    seen = observed(plain, ("sra", 4, MI, 2.0), ("sra", 4, 16 * MI, 3.0))
    low_s, high_s = seconds(plain, "sra", MI, 4), 2 * seconds(plain, "sra", 16 * MI, 4)
    slope_s = (high_s - low_s) / 15
    for mi, excess_s in [(1, low_s), (4, low_s + 3 * slope_s), (16, high_s), (0.001, low_s),
                         (256, low_s + 255 * slope_s)]:  # fmt: skip
        count = int(mi * MI)
        expected = seconds(plain, "sra", count, 4) + excess_s
        assert seconds(seen, "sra", count, 4) == pytest.approx(expected, rel=1e-6)
    for name, bits in [("allgather", 4), ("ring", None)]:
        assert seconds(seen, name, MI, bits) == seconds(plain, name, MI, bits)


def test_no_time_is_predicted_that_cannot_be():
    seen = observed(machine(4), ("ring", None, MI, 1.0), ("ring", None, 2 * MI, 0.3))
    for count in (MI, 4 * MI, 64 * MI):
        assert seconds(seen, "ring", count) >= 0.1 * seconds(machine(4), "ring", count)


def test_the_code_most_like_the_one_in_question_corrects_it():
    plain = machine(4)
    seen = observed(plain, ("sra", 8, MI, 3.0), ("sra", 2, MI, 1.5))
    for bits, factor in [(8, 3.0), (2, 1.5)]:
        assert seconds(seen, "sra", MI, bits) == pytest.approx(
            factor * seconds(plain, "sra", MI, bits)
        )


def test_a_code_between_two_observed_ones_is_corrected_by_the_first_of_them():
    def three_bits_s(m, count):
        return _core.allreduce_s(
            m, algorithm="sra", count=count, coding=_core.CodecSpec(scheme="qsgd", bits=3)
        )

    plain = machine(4)
    seen = observed(plain, ("sra", 4, MI, 2.0), ("sra", 2, MI, 5.0))
    excess_s = seconds(plain, "sra", MI, 4)
    for count in (MI // 2, MI, 8 * MI):
        expected = three_bits_s(plain, count) + excess_s
        assert three_bits_s(seen, count) == pytest.approx(expected, rel=1e-6)


def test_a_slow_start_raises_the_threshold():
    # Few bytes among a power of two of ranks take another way, which holds the threshold up.
    quick = machine(6, byte_s=1e-9)
    slow = observed(quick, ("sra", 4, 1024, 3.0))
    assert _core.plan_threshold(slow, SPECS[4]) > 2 * _core.plan_threshold(quick, SPECS[4])


def a_slow_trial(at):
    """Return a machine with trials of which one, in 8 bits, took six times as long."""
    return observed(
        machine(2, byte_s=8e-8),
        *(
            (name, bits, count, 6.0 if bits and count == at else 1.0)
            for count in (1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 22)
            for name, bits in (("direct", None), ("sra", 8))
        ),
    )


def test_reasons_are_true_where_a_code_wins_loses_and_wins_again():
    m = a_slow_trial(at=1 << 16)
    least = _core.plan_threshold(m, SPECS[8])
    size = f"{least * 4 / 1024:.0f} KiB"
    assert 1 << 16 < least < 1 << 17
    for k in range(11, 31):
        chosen = plan(m, 1 << k, (8,))
        if k in (15, 16):
            assert chosen.reason.endswith(f"so fp32; compressing pays from {size}")
        else:
            assert chosen.reason.endswith(f"so compress, as from {size} on")
        assert (chosen.spec is None) == (k in (15, 16))


def test_reasons_are_true_where_a_code_wins_only_when_small():
    m = a_slow_trial(at=1 << 22)
    assert _core.plan_threshold(m, SPECS[8]) is None
    small, large = (plan(m, count, (8,)) for count in (1 << 14, 1 << 22))
    assert small.spec == SPECS[8]
    assert small.reason.endswith("so compress; at 4096 MiB fp32 wins")
    assert large.spec is None
    assert "so fp32, as at 4096 MiB: " in large.reason


def test_any_algorithm_that_was_observed_may_be_planned_and_auto_alone_otherwise():
    plain = machine(4)
    seen = observed(
        plain,
        ("direct", None, MI, 1.0),
        ("ring", None, MI, 0.5),
        ("sra", 4, MI, 1.0),
        ("allgather", 4, MI, 0.2),
    )
    assert seen.known(compressed=False) == ["direct", "ring"]
    assert seen.known(compressed=True) == ["sra", "allgather"]
    exact = _core.plan(seen, count=MI, codecs=[], any_algorithm=True)
    assert exact.algorithm == "ring"
    assert exact.seconds == pytest.approx(seconds(plain, "ring", MI) / 2)
    assert plan(seen, MI, any_algorithm=True).algorithm == "allgather"
    assert plan(seen, MI).algorithm == "sra"
    assert plan(seen, MI, any_algorithm=True, coded="sra2d").algorithm == "sra2d"


def test_of_ways_as_fast_as_each_other_the_first_observed_is_planned():
    seen = observed(machine(4), ("direct", None, MI, 1.0), ("ring", None, MI, 0.99))
    assert _core.plan(seen, count=MI, codecs=[], any_algorithm=True).algorithm == "direct"


def test_fewer_bits_must_save_time():
    assert plan(machine(), 25 * MI, (8, 4, 2)).spec == SPECS[2]
    # Bound by coding, which costs the same for all: the most accurate code is taken.
    bound = machine(byte_s=1e-9, codec_s=0.8e-9)
    assert plan(bound, 25 * MI, (8, 4, 2)).spec == SPECS[8]


@pytest.mark.parametrize(
    ("byte_s", "eden_s", "chosen"),
    [
        (GIGABIT_S, 1.0, "eden(bits=3"),  # a quarter fewer bytes than QSGD's 4 bits
        (1e-10, 1.0, "eden(bits=4"),  # coding is the limit, and costs all the same
        (1e-10, 4.0, "qsgd(bits=8"),  # it costs more, and QSGD's 8 bits lose least
    ],
)
def test_a_code_that_loses_more_must_save_time(byte_s, eden_s, chosen):
    """QSGD's 4 bits lose four times as much as EDEN's, and more than its 3."""
    codecs = [SPECS[4], *(_core.CodecSpec(scheme="eden", bits=bits) for bits in (4, 3))]
    if "qsgd" in chosen:
        codecs.append(SPECS[8])
    cost_s = [CODEC_S * (eden_s if spec.scheme == "eden" else 1.0) for spec in codecs]
    costs = [(spec, s, s, s) for spec, s in zip(codecs, cost_s, strict=True)]
    m = _core.Machine(ranks=4, across=(ALPHA_S, byte_s), codecs=costs)
    plans = [_core.plan(m, count=25 * MI, codecs=each) for each in itertools.permutations(codecs)]
    assert len({(p.algorithm, repr(p.spec), p.seconds, p.reason) for p in plans}) == 1
    assert repr(plans[0].spec).startswith(chosen)


def test_the_order_of_the_codecs_does_not_count():
    m = machine(byte_s=3e-10)
    for count in (1, 1000, MI, 25 * MI):
        plans = [plan(m, count, order) for order in itertools.permutations((8, 4, 2))]
        assert len({(p.algorithm, repr(p.spec), p.seconds, p.reason) for p in plans}) == 1


def test_nothing_is_compressed_for_one_rank_or_without_codecs():
    assert "one rank" in plan(machine(1), MI).reason
    assert plan(machine(1), MI).spec is None
    assert "no compression" in _core.plan(machine(), count=MI, codecs=[]).reason


def test_an_explicit_algorithm_is_kept():
    chosen = plan(machine(), MI, exact="ring", coded="allgather")
    assert chosen.algorithm == "allgather"
    assert _core.plan(machine(), count=MI, codecs=[], exact="ring").algorithm == "ring"
    with pytest.raises(UsageError, match="algorithm"):
        plan(machine(), MI, coded="rings")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ranks": 2, "observed": [("ring", None, 9, 0.0)]}, "observed ring seconds"),
        ({"ranks": 2, "observed": [("ring", SPECS[4], 9, 1.0)]}, "observed ring code"),
        ({"ranks": 2, "observed": [("sra", None, 9, 1.0)]}, "observed sra code"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 4, "ranks_per_node": 3}, "ranks_per_node"),
        ({"ranks": 2, "across": (-1.0, 0.0)}, "alpha_s"),
        ({"ranks": 2, "add_s_per_byte": math.nan}, "add_s_per_byte"),
        ({"ranks": 2, "codecs": [(SPECS[4], math.inf, 0, 0)]}, "encode_s"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(fields, named):
    with pytest.raises(UsageError, match=f"measured machine: {named} is"):
        _core.Machine(**fields)


def measure(ranks, ranks_per_node, specs):
    """Return what each rank measures, the ranks being threads."""
    world = _core.ThreadWorld(ranks)

    def run(rank):
        communicator = _core.Communicator.over_threads(world, rank, ranks_per_node)
        return communicator.measure(specs, ranks_per_node=ranks_per_node)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def facts(m):
    times = (
        m.within,
        m.across,
        m.shared,
        m.add_s_per_byte,
    )
    return (m.ranks, m.ranks_per_node, m.exact, m.coded, *times, m.codecs, m.observed)


@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.full),
        pytest.param(3, 3, marks=pytest.mark.full),
        (4, 2),
    ],
)
def test_every_rank_measures_the_same_positive_machine(ranks, per_node):
    specs = [SPECS[8], _core.CodecSpec(bits=4, bucket_size=192)]
    first, *others = measure(ranks, per_node, specs)
    assert [repr(facts(m)) for m in others] == [repr(facts(first))] * (ranks - 1)
    assert first.add_s_per_byte > 0
    assert [cost[0] for cost in first.codecs] == specs
    assert all(0 < s < 1e-6 for cost in first.codecs for s in cost[1:])
    assert (first.within[0] > 0) == (per_node > 1)
    assert (first.across[0] > 0) == (ranks > per_node)
    assert first.link[0] > 0 or ranks == 1
    for compressed in (False, True) if ranks > 1 else ():
        auto = first.coded if compressed else first.exact
        assert auto in first.known(compressed=compressed)
        assert "requantizing_ring" not in first.known(compressed=compressed)
    assert {repr(o[1]) for o in first.observed} == (
        {"None", *map(repr, specs)} if ranks > 1 else set()
    )


def test_measuring_refuses_nodes_that_do_not_divide_the_ranks():
    with pytest.raises(UsageError, match="ranks_per_node is 2"):
        _core.Communicator.over_threads(_core.ThreadWorld(3), 0).measure([], ranks_per_node=2)
