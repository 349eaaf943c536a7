"""The advice to compress rests on what was measured, and says its numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.findings import findings
from tests.scaling.samples import PARAMETERS, attempts, metered, study

BOTH = (32, 4)


def judged(speeds, *, repeats=3, wobble=0.005, where=None, site="", reached=None, **final):
    """Judge 4 bit on two ranks.

    Args:
        speeds: by bits.
        reached: accuracies by bits, one for each repeat.
        final: fields of the final record by bits.
    """
    whole = study(**{"nodes": (1, 2), "bits": BOTH, "repeats": repeats, **(where or {})})
    found = [
        metered(
            p,
            speed=speeds[p.bits] * (1 + wobble * (p.repeat - 2)),
            **{name: by_bits[p.bits] for name, by_bits in final.items()},
            **({} if reached is None else {"test_accuracy": reached[p.bits][p.repeat - 1]}),
        )
        for p in plan(whole)
    ]
    analysis = analyse([_on_its_network(each) for each in found], site=site)
    (only,) = analysis.cases[0].break_even
    return only, findings(whole, analysis, machine=None).cases[0]


def _on_its_network(attempt):
    if attempt.point.case.network in ("", "none") or attempt.point.nodes == 1:
        return attempt
    told = {"event": "network", "network": attempt.point.case.network}
    return replace(attempt, records=(*attempt.records, told))


def test_the_break_even_bandwidth_is_that_of_the_cost_model():
    coding_s = {32: 0.0, 4: 2e-3}
    found, _ = judged({32: 100.0, 4: 130.0}, coding_s=coding_s)
    saved = 2 * (2 - 1) / 2 * (4 - (4 / 8 + 4 / 512))  # bytes per element, norms included
    assert found.bandwidth == pytest.approx(saved / (2e-3 / PARAMETERS), rel=1e-4)


def test_only_coding_beyond_that_of_fp32_is_a_price():
    found, _ = judged({32: 100.0, 4: 130.0}, coding_s={32: 2e-3, 4: 2e-3})
    assert found.bandwidth == math.inf
    assert "coding costs nothing measurable" in found.reason


def test_the_bandwidth_seen_is_fp32s_bytes_over_its_time_in_collectives():
    found, _ = judged({32: 100.0, 4: 130.0}, comm_s={32: 0.01, 4: 0.005})
    assert found.measured == pytest.approx(PARAMETERS * 4 / 0.01)


@pytest.mark.parametrize(("four", "verdict"), [(130.0, "yes"), (70.0, "no"), (100.2, "no")])
def test_the_verdict_is_that_of_the_measured_speeds(four, verdict):
    found, words = judged({32: 100.0, 4: four})
    assert found.verdict == verdict
    assert "it trains at" in found.reason.lower()
    assert words.advice == f"Compress to 4 bit? {verdict.capitalize()}. {found.reason}"


def test_a_gain_has_its_interval_and_a_difference_inside_the_noise_is_none():
    found, _ = judged({32: 100.0, 4: 130.0})
    assert "1.30× the speed of fp32 (95%: 1.2" in found.reason
    loud, _ = judged({32: 100.0, 4: 110.0}, wobble=0.2)
    assert loud.verdict == "undecided"
    assert "a difference that the noise could explain (about 73 runs" in loud.reason


@pytest.mark.parametrize(
    ("four", "speed", "gain"), [(90.0, "0.90×", "nothing"), (100.2, "1.00×", "at most 2%")]
)
@pytest.mark.parametrize(
    ("where", "site", "place"),
    [
        ({"networks": ("10gbit",)}, "local", "At 10 Gb/s"),
        ({"networks": ("none",)}, "local", "In shared memory"),
        ({}, "local", "On one machine"),
        ({}, "polaris", "On polaris"),
        ({"nodes": (1,), "ranks_per_node": 2}, "polaris", "Within one node of polaris"),
        ({}, "", "Here"),
    ],
)
def test_that_little_or_nothing_is_gained_is_said_once_with_the_place(
    four, speed, gain, where, site, place
):
    found, words = judged({32: 100.0, 4: four}, where=where, site=site)
    said = f"{place} this model gains {gain} from 4 bit: it trains at {speed} the speed of fp32"
    assert found.verdict == "no"
    assert found.reason.startswith(f"{said} (95%: ")
    assert words.advice.count("this model gains") == 1


@pytest.mark.parametrize(
    ("four", "more"),
    [
        (130.0, {}),
        (100.0, {"wobble": 0.2}),  # the noise would hide a gain
        (90.0, {"wobble": 0.2}),
        (100.0, {"repeats": 1}),
        (70.0, {"repeats": 1}),
        (130.0, {"test_accuracy": {32: 0.97, 4: 0.92}}),  # a gain of speed that costs quality
    ],
)
def test_that_nothing_is_gained_is_not_said_where_it_may_be(four, more):
    found, _ = judged({32: 100.0, 4: four}, **more)
    assert "this model gains" not in found.reason
    assert found.reason.startswith(("It trains at", "It trained at"))


def test_speed_bought_with_quality_is_no_gain():
    found, _ = judged(
        {32: 100.0, 4: 150.0}, reached={32: (0.97, 0.968, 0.972), 4: (0.92, 0.93, 0.91)}
    )
    assert found.verdict == "no"
    assert "but it costs quality: test accuracy −5.00 points, where chance explains" in found.reason


def test_where_nothing_is_gained_the_room_that_there_was_is_told():
    found, _ = judged({32: 100.0, 4: 90.0})
    assert (
        "fp32 waits 20% of a step for communication, so the largest possible speed-up is 1.25×"
        in found.reason
    )


def test_a_script_that_records_speed_alone_has_a_verdict_without_a_model():
    whole = study(bits=BOTH, repeats=3)
    found = attempts(whole, lambda p: p.repeat + (200.0 if p.bits == 4 else 100.0))
    (only,) = analyse(found).cases[0].break_even
    assert (only.verdict, only.bandwidth) == ("yes", None)


def test_one_run_each_decides_nothing():
    found = attempts(study(bits=BOTH), lambda p: 200.0 if p.bits == 4 else 100.0)
    (only,) = analyse(found).cases[0].break_even
    assert only.verdict == "undecided"
    assert "2.00× the speed of fp32 (one run; three or more are needed to tell)" in only.reason


def test_without_fp32_beside_it_or_on_one_rank_nothing_is_judged():
    for whole in (study(bits=(8, 4), nodes=(2,)), study(nodes=(1,)), study(bits=(32,))):
        assert analyse(attempts(whole)).cases[0].break_even == ()
