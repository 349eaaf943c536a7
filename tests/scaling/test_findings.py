"""The report's sentences claim no more than the numbers bear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.verdicts import compare_speed
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.cautions import Machine
from qsgd_hpc.scaling.report.findings import findings
from tests.scaling.samples import attempt, attempts, metered, metered_attempts, several, study


def told(whole, found, *, one_machine=False):
    analysis = analyse(found, mode=whole.mode, cases=whole.cases)
    return findings(whole, analysis, machine=Machine.ONE if one_machine else None)


def by_bits(speeds):
    return lambda point: speeds[point.bits] * point.ranks


def verdict(packed, plain):
    """Compare 4 bit, measured once per speed given, with fp32."""
    repeats = max(len(packed), len(plain))
    whole = study(nodes=(2,), bits=(32, 4), repeats=repeats)
    speeds = {4: packed, 32: plain}
    found = [
        attempt(p, speed=speeds[p.bits][p.repeat - 1])
        for p in plan(whole)
        if p.repeat <= len(speeds[p.bits])
    ]
    (case,) = analyse(found).cases
    fp32, four = case.rows()
    return compare_speed(case, four, fp32)


def test_no_difference_is_claimed_where_the_interval_of_the_ratio_includes_one():
    assert verdict([99, 150, 160], [90, 100, 101]).word == "unclear"
    assert verdict([102, 101, 103], [99, 98, 100]).word == "faster"
    assert verdict([89, 90, 91], [99, 100, 101]).word == "slower"
    assert verdict([99, 100, 101], [99, 100, 101.5]).word == "same"


def test_two_repeats_claim_only_what_two_repeats_can():
    # Both of one above both of the other happens by chance in one of six studies.
    assert verdict([104, 110], [100, 103]).word == "unclear"
    assert verdict([140, 141], [100, 101]).word == "faster"


def test_single_runs_show_no_difference_and_no_equality():
    for packed, plain in (([100], [100]), ([300], [100]), ([90], [100, 99, 101])):
        assert verdict(packed, plain).word == "once"


def test_a_gain_is_stated_with_its_bytes():
    whole = study()
    text = told(whole, attempts(whole, by_bits({32: 100.0, 8: 120.0, 4: 130.0})))
    assert text.headline == (
        "On 2 nodes, 4-bit QSGD sent 7.88× fewer bytes and trained at 1.30× the speed of fp32 "
        "(one run)"
    )


def test_a_loss_of_speed_is_stated_as_one():
    whole = study()
    text = told(whole, attempts(whole, by_bits({32: 100.0, 8: 80.0, 4: 70.0})))
    assert text.headline.endswith(
        "3.97× fewer bytes but trained at 0.80× the speed of fp32 (one run)"
    )


def test_a_training_that_slows_with_more_ranks_is_not_praised():
    speeds = {1: 1000.0, 2: 130.0}
    for repeats, end in (
        (1, "; it trained at 0.13× the speed of 1 rank (one run)"),
        (3, "; it trains at 0.13× the speed of 1 rank"),
    ):
        whole = study(bits=(32, 4), repeats=repeats)
        found = attempts(whole, lambda p: speeds[p.ranks] + p.repeat)
        assert told(whole, found).headline.endswith(end)
    # A decline that the noise could explain.
    unsure = attempts(study(bits=(32, 4), repeats=3), lambda p: 1000 / p.ranks ** (p.repeat - 2))
    assert "rank" not in told(study(bits=(32, 4), repeats=3), unsure).headline
    cases = told(several(), attempts(several(), lambda p: speeds[p.ranks]))
    assert cases.headline.endswith("; 6 cases slower than on fewer ranks")


def test_a_gain_of_runs_that_diverged_is_not_stated_alone():
    found = metered_attempts(study(bits=(32, 4), repeats=3), speed=by_bits({32: 100.0, 4: 130.0}))
    lost = {"test_accuracy": None, "nonfinite": ["test_accuracy"]}
    found = [
        replace(a, records=tuple({**r, **lost} if "test_accuracy" in r else r for r in a.records))
        if a.point.bits == 4 and a.point.repeat > 1
        else a
        for a in found
    ]
    headline = told(study(bits=(32, 4), repeats=3), found).headline
    assert headline.endswith("2 of its 3 runs have no test accuracy, as after a divergence"), (
        headline
    )


@pytest.mark.parametrize(("speed", "joint"), [(130.0, "but trained"), (70.0, "and trained")])
def test_equal_bytes_are_not_called_fewer(speed, joint):
    whole = study(bits=(32, 4))
    found = [
        attempt(p, speed=speed if p.bits == 4 else 100.0, wire_bytes=1_000_000 * (p.ranks - 1))
        for p in plan(whole)
    ]
    headline = told(whole, found).headline
    assert headline.startswith(f"On 2 nodes, 4-bit QSGD sent no fewer bytes {joint} at")


def test_no_gain_is_claimed_inside_the_noise():
    whole = study(repeats=3)
    noise = {1: 0.8, 2: 1.0, 3: 1.2}
    speed = {32: 100.0, 8: 110.0, 4: 115.0}
    found = attempts(whole, lambda p: speed[p.bits] * p.ranks * noise[p.repeat])
    text = told(whole, found)
    assert text.headline.endswith("but shows no speed difference to fp32 above the noise")
    assert "no difference is claimed" in text.cautions[0]
    assert "Student's t of 3 repeats" in text.cautions[0]


def test_a_gain_beyond_the_noise_has_its_interval():
    whole = study(repeats=3)
    noise = {1: 0.99, 2: 1.0, 3: 1.01}
    text = told(whole, attempts(whole, lambda p: 400 / p.bits**0.5 * noise[p.repeat]))
    assert text.headline.endswith("and trains 2.83× as fast as fp32")
    assert "Speed of 4 bit over fp32: 2.77 to 2.89 with 95% confidence" in text.lead


def test_bits_that_cost_accuracy_do_not_make_the_headline():
    whole = study(bits=(32, 8, 2))
    accuracy = {32: 0.988, 8: 0.987, 2: 0.95}
    found = [attempt(p, speed=100.0 * p.ranks, test_accuracy=accuracy[p.bits]) for p in plan(whole)]
    assert told(whole, found).headline.startswith("On 2 nodes, 8-bit")


def test_without_fp32_or_compression_the_headline_is_of_scaling():
    only = study(bits=(32,))
    assert told(only, attempts(only)).headline == (
        "With fp32, 2 nodes train 1.82× as fast as 1 rank, 91% of ideal (one run)"
    )
    packed = study(nodes=(2, 4), bits=(8, 4))
    assert "2 ranks at 8 bit" in told(packed, attempts(packed)).headline
    alone = study(nodes=(1,))
    assert told(alone, attempts(alone)).headline == "1 node trains at 1,000 images/s (one run)"


def test_simulated_nodes_and_small_data_are_owned_up_to():
    whole = study()
    found = [attempt(p, speed=100.0, dataset="digits") for p in plan(whole)]
    heads = [c.split(":")[0] for c in told(whole, found, one_machine=True).cautions]
    assert heads == ["Noise", "One machine", "Hidden communication", "Data"]
    quiet = told(whole, metered_attempts(whole)).cautions
    assert [c.split(":")[0] for c in quiet] == ["Noise"]


def test_made_up_data_is_owned_up_to():
    whole = study()
    found = [metered(p, speed=100.0, dataset="synthetic") for p in plan(whole)]
    assert "synthetic data" in told(whole, found).cautions[-1]


def test_more_than_ideal_is_questioned():
    whole = study()
    text = told(whole, attempts(whole, lambda p: 100.0 * p.ranks**1.3))
    assert text.cautions[1].startswith(
        "Above ideal: train, batch 128, 2 nodes, fp32 reaches 123% of ideal."
    )


def test_words_and_perplexity_have_their_own_units_and_lower_is_better():
    whole = study(script=study().programs[0].script.with_name("ptb.py"), bits=(32, 4))
    found = [
        metered(p, speed=500.0 * p.ranks, unit="words", perplexity=118.0 + 3 * (p.bits == 4))
        for p in plan(whole)
    ]
    text = told(whole, found)
    assert "Perplexity (lower is better): 118 with fp32, 121 with 4 bit" in text.lead
    assert "The global batch stays at 128 sequences" in text.lead
    tiles = {t.label: t for t in text.tiles}
    assert tiles["Throughput"].unit == "words/s"
    assert tiles["Perplexity"].detail == "4 bit, +3.00 from fp32, one run"
    assert tiles["Exposed communication"].value == "20%"


def test_bits_that_cost_perplexity_do_not_make_the_headline():
    whole = study(script=study().programs[0].script.with_name("ptb.py"), bits=(32, 8, 2))
    costs = {32: 118.0, 8: 118.4, 2: 140.0}
    found = [
        metered(p, speed=500.0 * p.ranks, unit="words", perplexity=costs[p.bits])
        for p in plan(whole)
    ]
    assert told(whole, found).headline.startswith("On 2 nodes, 8-bit")


def test_several_cases_are_counted_and_each_has_its_own_words():
    whole = several(bits=(32, 4))
    gain = {"resnet34": 1.5, "ptb-small": 1.0}

    def speed(p):
        return 100.0 * p.ranks * (gain[p.case.workload] if p.bits == 4 and p.ranks > 1 else 1.0)

    once = told(whole, metered_attempts(whole, speed))
    assert once.headline == "In 6 cases QSGD trained at 1.00× to 1.50× the speed of fp32 (one run)"
    assert once.tiles[2].detail.endswith(", one run")
    whole = several(bits=(32, 4), repeats=3)
    text = told(whole, metered_attempts(whole, lambda p: speed(p) * (1 + p.repeat / 500)))
    assert text.headline == (
        "In 4 of 6 cases compressing pays: QSGD trains up to 1.50× as fast as fp32 "
        "(resnet34 (torch), batch 128, 4 bit)"
    )
    assert text.lead.startswith("6 cases on 1 to 2 ranks, 54 measurements;")
    assert [c.case for c in text.cases] == list(whole.cases)
    assert all(c.headline and c.lead and 2 <= len(c.tiles) <= 6 for c in text.cases)
    assert [t.label for t in text.tiles] == [
        "Cases",
        "Highest efficiency",
        "Highest speed",
        "Lowest speed",
    ]
    assert text.tiles[3].detail.endswith(", inside the noise")


def test_several_cases_without_gain_or_without_compression_say_so():
    whole = several(bits=(32, 4), repeats=3)
    for spread, headline in (
        (0.002, "In none of 6 cases does compressing pay"),
        (0.2, "In none of 6 cases is it shown that compressing pays"),
    ):
        found = metered_attempts(whole, lambda p, s=spread: 100.0 * p.ranks * (1 + s * p.repeat))
        assert told(whole, found).headline == headline
        # Of the other cases there is no float32.
        some = [a for a in found if a.point.bits == 4 or a.point.case == whole.cases[0]]
        assert told(whole, some).headline == headline.replace("none of 6 cases", "no case")
    plain = several(bits=(32,))
    scaled = told(plain, metered_attempts(plain))
    assert scaled.headline == "6 cases on 2 nodes speed up 1.82×, 91% of ideal (one run)"


def test_a_partial_study_of_one_size_has_no_efficiency_and_names_its_bits():
    """Its only size is its own reference, which would be 100% of ideal."""
    for whole, more in ((study(), []), (several(), ["Cases"])):
        found = [a for a in metered_attempts(whole) if (a.point.ranks, a.point.bits) == (2, 4)]
        text = told(whole, found)
        assert [t.label for t in text.tiles if "fficiency" in t.label] == []
        assert [t.label for t in text.tiles[:1]] == (more or ["Throughput"])
    assert text.cases[0].headline == "2 nodes train at 1,818 images/s with 4 bit (one run)"


def test_weak_scaling_warns_of_comparing_the_quality_of_sizes():
    whole = study(mode="weak")
    text = told(whole, metered_attempts(whole, lambda p: 100.0 * p.ranks))
    assert "Quality" in [c.split(":")[0] for c in text.cautions]
    assert "Each rank keeps its batch of 128 images" in text.lead


def test_a_study_that_records_speed_alone_still_has_a_report():
    whole = study()
    bare = dict.fromkeys(("test_accuracy", "wire_bytes", "comm_time_s", "steps", "dataset"))
    text = told(whole, [attempt(p, speed=100.0 * p.ranks, **bare) for p in plan(whole)])
    assert text.headline == "On 2 nodes, 4-bit QSGD trained at 1.00× the speed of fp32 (one run)"
    assert [t.label for t in text.tiles] == ["Throughput", "Efficiency"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (428_230, "428 kB"),
        (3_000_000, "3.00 MB"),
        (12_740_000, "12.7 MB"),
        (999_600, "1.00 MB"),
        (2.5e18, "2,500 PB"),
        (None, "–"),
    ],
)
def test_bytes_have_three_digits_and_the_right_unit(value, text):
    assert units.bytes_short(value) == text


def test_differences_of_accuracy_never_read_minus_zero():
    assert units.points(-1e-9) == units.points(1e-9) == "±0.00 points"
    assert units.points(-0.0008) == "−0.08 points"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00074, "740 µs"), (0.0123, "12.3 ms"), (1.871, "1.87 s"), (75, "1 min 15 s"), (None, "–")],
)
def test_short_times_have_three_digits_and_the_right_unit(value, text):
    assert units.seconds(value) == text


def test_a_script_that_chooses_its_own_bits_is_pointed_out():
    def cautions(nmse):
        whole = study(bits=(32, 4))
        found = [metered(p, speed=100.0, **(nmse if p.ranks > 1 else {})) for p in plan(whole)]
        return [each for each in analyse(found).cautions if each.startswith("Bits:")]

    assert cautions({}) == []
    (caution,) = cautions({"nmse": 0.01})
    assert "the script compressed gradients although the study set fp32" in caution
    (caution,) = cautions({"nmse": None, "bits": 32})
    assert "the script compressed no gradient although the study set 4 bit" in caution
