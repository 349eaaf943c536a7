"""The report's sentences claim no more than the numbers bear."""

from __future__ import annotations

import pytest

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.analyse import analyse
from qsgd_hpc.scaling.findings import compare_speed, findings
from qsgd_hpc.scaling.plan import plan
from tests.unit.scaling_samples import attempt, attempts, study


def told(whole, found, *, one_machine=False):
    return findings(whole, analyse(found), one_machine=one_machine)


def by_bits(speeds):
    return lambda point: speeds[point.bits] * point.ranks


def row(speed, low=None, high=None):
    return {
        "images_per_s": speed,
        "images_per_s_min": low or speed,
        "images_per_s_max": high or speed,
        "repeats": 1 if low is None else 3,
    }


def test_ranges_that_overlap_are_called_the_same_however_far_the_medians_are_apart():
    assert compare_speed(row(150, 99, 160), row(100, 90, 100)) == "same"
    assert compare_speed(row(102, 101, 103), row(100, 99, 100)) == "faster"
    assert compare_speed(row(90, 89, 91), row(100, 99, 100)) == "slower"


def test_one_run_each_is_called_the_same_within_its_margin():
    assert compare_speed(row(104), row(100)) == "same"
    assert compare_speed(row(106), row(100)) == "faster"
    assert compare_speed(row(90), row(100, 99, 101)) == "slower"


def test_a_gain_is_stated_with_its_bytes():
    whole = study()
    text = told(whole, attempts(whole, by_bits({32: 100.0, 8: 120.0, 4: 130.0})))
    assert text.headline == (
        "On 2 nodes, 4-bit QSGD sends 7.88× fewer bytes and trains 1.30× as fast as fp32 (one run)"
    )


def test_a_loss_of_speed_is_stated_as_one():
    whole = study()
    text = told(whole, attempts(whole, by_bits({32: 100.0, 8: 80.0, 4: 70.0})))
    assert text.headline.endswith(
        "3.97× fewer bytes but trains at 0.80× the speed of fp32 (one run)"
    )


def test_no_gain_is_claimed_inside_the_noise():
    whole = study(repeats=3)
    noise = {1: 0.8, 2: 1.0, 3: 1.2}
    speed = {32: 100.0, 8: 110.0, 4: 115.0}
    found = attempts(whole, lambda p: speed[p.bits] * p.ranks * noise[p.repeat])
    text = told(whole, found)
    assert text.headline.endswith("and trains as fast as fp32")
    assert "overlap no difference is claimed" in text.cautions[0]


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
    assert heads == ["Noise", "One machine", "Data"]
    assert [c.split(":")[0] for c in told(whole, attempts(whole)).cautions] == ["Noise"]


def test_more_than_ideal_is_questioned():
    whole = study()
    text = told(whole, attempts(whole, lambda p: 100.0 * p.ranks**1.3))
    assert text.cautions[1].startswith("Above ideal: 2 nodes with fp32 reach 123% of ideal.")


def test_a_study_that_records_speed_alone_still_has_a_report():
    whole = study()
    bare = dict.fromkeys(("test_accuracy", "wire_bytes", "comm_time_s", "steps", "dataset"))
    text = told(whole, [attempt(p, speed=100.0 * p.ranks, **bare) for p in plan(whole)])
    assert text.headline == "On 2 nodes, 4-bit QSGD trains as fast as fp32 (one run)"
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
    assert words.bytes_short(value) == text


def test_differences_of_accuracy_never_read_minus_zero():
    assert words.points(-1e-9) == words.points(1e-9) == "±0.00 points"
    assert words.points(-0.0008) == "−0.08 points"
