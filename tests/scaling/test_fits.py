"""Fits of scaling laws and of a link recover a known truth and claim no more than runs tell."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.fits import applies, fit_law, fit_link, peak_ranks
from qsgd_hpc.scaling.analysis.results import Estimate, Fit, LinkFit
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.drawing.lines import best_fits, speedup_panels
from qsgd_hpc.scaling.report.findings import law_sentence, link_sentence
from tests.scaling.samples import (
    PARAMETERS,
    amdahl,
    attempt,
    attempts,
    gustafson,
    metered,
    metered_attempts,
    study,
    usl,
)

SIZES = st.lists(
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 64, 256]), min_size=4, max_size=7, unique=True
)
TRIALS = 200
# 95 % of 200 are 190; 179 or fewer have a probability of 0.1 % (binomial).
COVERED = 180


def law(name, **parameters):
    return Fit(name, 32, {k: Estimate(v) for k, v in parameters.items()}, 0.0, 0)


def fitted(truth, sizes, *, repeats=1, noise=0.0, draw=None, name=None, mode="strong"):
    ranks = np.repeat(np.array(sorted(sizes), dtype=float), repeats)
    speeds = 321.0 * np.array([truth.speedup(p) for p in ranks])
    if noise:
        speeds *= np.exp(noise * draw.standard_normal(len(ranks)))
    return fit_law(name or truth.law, 32, ranks, speeds, mode)


def holds(estimate, value, slack=1e-6):
    return estimate.low - slack <= value <= estimate.high + slack


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["amdahl", "gustafson"]), st.floats(0, 1), SIZES)
def test_a_perfect_serial_share_is_recovered(name, serial, sizes):
    fit = fitted(law(name, serial=serial), sizes)
    assert fit.parameters["serial"].value == pytest.approx(serial, abs=1e-6)
    assert holds(fit.parameters["serial"], serial)
    assert fit.error < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.9), st.floats(0, 0.1), SIZES)
def test_a_perfect_universal_law_is_recovered(contention, coherency, sizes):
    fit = fitted(law("usl", contention=contention, coherency=coherency), sizes)
    assert fit.parameters["contention"].value == pytest.approx(contention, abs=1e-5)
    assert fit.parameters["coherency"].value == pytest.approx(coherency, abs=1e-6)
    assert holds(fit.parameters["contention"], contention)
    assert holds(fit.parameters["coherency"], coherency)


@pytest.mark.parametrize(
    "truth",
    [
        law("amdahl", serial=0.1),
        law("amdahl", serial=0.0),  # at its bound
        law("gustafson", serial=0.2),
        law("usl", contention=0.05, coherency=0.002),
        law("usl", contention=0.1, coherency=0.0),
    ],
    ids=lambda truth: f"{truth.law}-{[e.value for e in truth.parameters.values()]}",
)
def test_under_noise_the_interval_holds_the_truth_as_often_as_it_says(truth):
    draw = np.random.default_rng(11)
    covered = dict.fromkeys(truth.parameters, 0)
    for _ in range(TRIALS):
        fit = fitted(truth, (1, 2, 4, 8, 16), repeats=3, noise=0.05, draw=draw)
        for name, true in truth.parameters.items():
            covered[name] += holds(fit.parameters[name], true.value)
    assert min(covered.values()) >= COVERED, covered


def test_without_repeats_the_sizes_alone_give_the_interval_and_it_is_wide():
    draw = np.random.default_rng(3)
    truth, covered = law("amdahl", serial=0.1), 0
    for _ in range(TRIALS):
        fit = fitted(truth, (1, 2, 4), noise=0.03, draw=draw)
        covered += holds(fit.parameters["serial"], 0.1)
    assert covered >= COVERED


def test_pure_noise_is_not_taken_for_a_gain():
    draw = np.random.default_rng(5)
    flat = law("amdahl", serial=1.0)
    claims = sum(
        fitted(flat, (1, 2, 4, 8), repeats=3, noise=0.05, draw=draw).parameters["serial"].high < 1
        for _ in range(TRIALS)
    )
    assert claims <= TRIALS - COVERED


def test_two_sizes_determine_amdahl_and_say_so():
    once = fitted(law("amdahl", serial=0.3), (1, 2))
    assert once.parameters["serial"].value == pytest.approx(0.3)
    assert (once.parameters["serial"].low, once.parameters["serial"].high) == (None, None)
    assert "2 sizes determine it exactly" in once.caution and "No interval" in once.caution
    thrice = fitted(
        law("amdahl", serial=0.3), (1, 2), repeats=3, noise=0.02, draw=np.random.default_rng(1)
    )
    assert holds(thrice.parameters["serial"], 0.3)
    assert "No interval" not in thrice.caution
    loud = fitted(
        law("amdahl", serial=0.3), (1, 2), repeats=2, noise=0.3, draw=np.random.default_rng(1)
    )
    assert "contains every possible value" in loud.caution


def test_too_few_sizes_give_no_fit_or_one_that_only_passes_through_them():
    truth = law("usl", contention=0.1, coherency=0.01)
    assert fitted(truth, (1, 2)) is None
    assert fitted(truth, (4,), name="amdahl") is None
    assert "3 sizes determine it exactly" in fitted(truth, (1, 2, 4)).caution
    assert fitted(truth, (1, 2, 4, 8)).caution == ""


def test_sizes_that_depart_from_a_law_are_pointed_out():
    declining = law("usl", contention=0.02, coherency=0.02)
    draw = np.random.default_rng(2)
    fit = fitted(declining, (1, 2, 4, 8, 16), repeats=3, noise=0.01, draw=draw, name="amdahl")
    assert "the law does not fit" in fit.caution
    right = fitted(declining, (1, 2, 4, 8, 16), repeats=3, noise=0.01, draw=draw)
    assert right.caution == ""


@pytest.mark.parametrize(("mode", "name"), [("strong", "amdahl"), ("weak", "gustafson")])
def test_one_slow_run_does_not_outweigh_the_others(mode, name):
    truth = law(name, serial=0.1)
    ranks = np.repeat([1.0, 2.0, 4.0, 8.0], 3)
    speeds = np.array([truth.speedup(size) for size in ranks])
    speeds[-1] /= 2
    fit = fit_law(name, 32, ranks, speeds, mode)
    assert fit.speedup(8.0) >= speeds[-3:].mean() > 0.8 * truth.speedup(8.0)


def test_the_law_of_the_other_mode_is_named_as_such():
    truth = law("amdahl", serial=0.2)
    assert "Does not apply" in fitted(truth, (1, 2, 4), mode="weak").caution
    assert applies("gustafson", "weak") and not applies("gustafson", "strong")
    assert applies("usl", "weak") and applies("usl", "strong")


@pytest.mark.parametrize(("mode", "name"), [("strong", "amdahl"), ("weak", "gustafson")])
def test_of_two_sizes_the_law_of_the_mode_is_shown(mode, name):
    """Both laws pass through both points; rounding must not choose."""
    draw = np.random.default_rng(3)
    for _ in range(20):
        points = plan(study(mode=mode, bits=(32,)))
        speed = draw.uniform(50, 100)
        factors = {1: 1.0, 2: draw.uniform(1.1, 1.9)}
        measured = [attempt(point, speed=speed * factors[point.ranks]) for point in points]
        (case,) = analyse(measured, mode=mode).cases
        assert [fit.law for fit in best_fits(case)] == [name]


def test_a_law_that_does_not_apply_is_not_shown_even_if_it_fits_best():
    (case,) = analyse(attempts(study(nodes=(1, 2, 4, 8), bits=(32,)), gustafson)).cases
    assert min(case.fits, key=lambda fit: fit.error).law == "gustafson"
    assert [fit.applies for fit in best_fits(case)] == [True]


def test_a_law_that_falls_stays_inside_the_axes_of_its_chart():
    whole = study(nodes=(1, 2, 4, 8), bits=(32,))
    (case,) = analyse(attempts(whole, lambda p: usl(p, coherency=1.0))).cases
    axes = Figure().subplots()
    speedup_panels(case)[0].draw([axes])
    (fit,) = best_fits(case)
    assert axes.get_ylim()[0] < fit.speedup(16) < fit.speedup(8)


def test_throughput_that_falls_more_steeply_than_a_law_allows_gives_no_fit():
    speeds = dict(zip((2.0, 4.0, 8.0), (100.0, 30.0, 10.0), strict=True))
    ranks = np.array(list(speeds))
    assert fit_law("usl", 32, ranks, np.array(list(speeds.values())), "strong") is None


def test_a_fit_does_not_need_one_rank():
    fit = fitted(law("usl", contention=0.05, coherency=0.001), (4, 8, 16, 32))
    assert fit.parameters["contention"].value == pytest.approx(0.05, abs=1e-6)


def test_the_peak_of_the_universal_law_is_where_its_curve_turns():
    fit = fitted(law("usl", contention=0.05, coherency=0.002), (1, 2, 4, 8, 16))
    peak = peak_ranks(fit)
    assert peak.value == pytest.approx((0.95 / 0.002) ** 0.5, rel=1e-6)
    assert fit.speedup(peak.value) > max(fit.speedup(peak.value - 1), fit.speedup(peak.value + 1))
    assert "most throughput at 22 (22..22) ranks" in law_sentence(fit)
    falling = law("usl", contention=1.0, coherency=0.002)
    assert "most throughput at 1 rank;" in law_sentence(falling)
    assert peak_ranks(law("amdahl", serial=0.1)) is None
    assert peak_ranks(fitted(law("usl", contention=0.1, coherency=0.0), (1, 2, 4, 8))) is None


def test_a_peak_that_noise_could_explain_has_no_upper_bound():
    draw = np.random.default_rng(8)
    truth = law("usl", contention=0.05, coherency=1e-5)
    fits = [fitted(truth, (1, 2, 4, 8), repeats=2, noise=0.05, draw=draw) for _ in range(20)]
    peaks = [peak for fit in fits if (peak := peak_ranks(fit))]
    assert peaks and sum(p.high is None for p in peaks) >= len(peaks) - 3


def test_every_series_of_a_study_starts_from_one_rank_and_is_fitted():
    whole = study(nodes=(1, 2, 4, 8), bits=(32, 4))
    (case,) = analyse(attempts(whole)).cases
    fits = {(f.law, f.bits): f for f in case.fits}
    assert set(fits) == {(n, b) for n in ("amdahl", "usl", "gustafson") for b in (32, 4)}
    assert all(f.sizes == 4 for f in case.fits)
    assert case.fits[0].law == "amdahl" and case.fits[0].caution == ""
    for bits in (32, 4):
        assert fits["amdahl", bits].parameters["serial"].value == pytest.approx(0.1)
    weak = study(mode="weak", nodes=(1, 2, 4, 8), bits=(32,))
    (grown,) = analyse(attempts(weak, gustafson), mode="weak").cases
    assert grown.fits[0].law == "gustafson"
    assert grown.fits[0].parameters["serial"].value == pytest.approx(0.1)


def test_a_study_that_slows_down_is_recovered_by_the_universal_law():
    whole = study(nodes=(1, 2, 4, 8, 16), bits=(32,))
    (case,) = analyse(attempts(whole, usl)).cases
    fit = next(f for f in case.fits if f.law == "usl")
    assert fit.parameters["coherency"].value == pytest.approx(0.01)
    assert case.rows()[1]["speedup"] == pytest.approx(fit.speedup(2))
    (serial,) = analyse(attempts(whole, lambda p: amdahl(p, serial=1.0))).cases
    assert "at its bound of 1" in serial.fits[0].caution


@pytest.mark.parametrize(("name", "sizes"), [("amdahl", (1, 2)), ("usl", (1, 2, 4))])
def test_a_law_at_its_bound_does_not_pass_through_as_many_sizes_as_parameters(name, sizes):
    ranks = np.array(sizes, dtype=float)
    fit = fit_law(name, 32, ranks, 100 * ranks**1.4, "strong")
    assert fit.error > 0.1 and "determine it exactly" not in fit.caution


# --- the link

LINK_TRIALS = 100
# 95 % of 100 are 95; 86 or fewer have a probability of 0.1 % (binomial).
LINK_COVERED = 87


def runs(ranks, bits, *, latency=20e-6, bandwidth=1e9, repeats=1, noise=0.0, draw=None):
    """Return runs on a link of one message per peer and phase, in one reduction per step."""
    rows = [(p, b) for p in ranks for b in bits for _ in range(repeats)]
    frame = pd.DataFrame(rows, columns=["ranks", "bits"])
    per_element = np.where(frame["bits"] == 32, 4.0, frame["bits"] / 8 + 4 / 512)
    per_rank = 2 * (frame["ranks"] - 1) / frame["ranks"] * PARAMETERS * per_element
    frame["wire_bytes_per_step"] = per_rank * frame["ranks"]
    frame["coding_s"] = 1e-4
    frame["reductions_per_step"] = 1.0
    link_s = latency * 2 * (frame["ranks"] - 1) + per_rank / bandwidth
    if noise:
        link_s *= np.exp(noise * draw.standard_normal(len(frame)))
    frame["comm_s"] = link_s + frame["coding_s"]
    return frame


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11))
def test_a_perfect_link_is_recovered(latency, bandwidth):
    fit = fit_link(runs((2, 4, 8), (32, 8, 4), latency=latency, bandwidth=bandwidth))
    assert fit.latency_s.value == pytest.approx(latency, rel=1e-4)
    assert fit.bandwidth.value == pytest.approx(bandwidth, rel=1e-4)
    assert (fit.points, fit.caution) == (9, "")
    assert fit.error < 1e-9


@pytest.mark.parametrize(("latency", "noise", "repeats"), [(20e-6, 0.1, 2), (0.0, 0.3, 3)])
def test_under_noise_the_intervals_hold_the_link_as_often_as_they_say(latency, noise, repeats):
    draw = np.random.default_rng(4)
    held = {"latency": 0, "bandwidth": 0}
    where = {"latency": latency, "repeats": repeats, "noise": noise, "draw": draw}
    for _ in range(LINK_TRIALS):
        fit = fit_link(runs((2, 4, 8), (32, 8, 4), **where))
        held["latency"] += fit.latency_s.low <= latency <= fit.latency_s.high
        held["bandwidth"] += fit.bandwidth.low <= 1e9 <= (fit.bandwidth.high or math.inf)
    assert min(held.values()) >= LINK_COVERED, held


def test_rows_that_cannot_tell_are_owned_up_to():
    assert fit_link(runs((2,), (32,))) is None
    assert fit_link(runs((2, 4), (32,)).assign(reductions_per_step=0.0)) is None
    two = runs((2,), (32, 4))
    assert "Two rows determine it exactly" in fit_link(two).caution
    falling = fit_link(two.assign(comm_s=[1e-3, 2e-3]))
    assert falling.error > 0.1 and "exactly" not in falling.caution
    alike = fit_link(runs((2, 3), (32,)))
    assert "Not identifiable" in alike.caution
    assert "All rows have the same ranks" in fit_link(runs((4,), (32, 8, 4))).caution


def test_time_that_does_not_grow_with_bytes_gives_no_bandwidth():
    falling = runs((4,), (32, 8, 4))
    falling["comm_s"] = [1e-3, 2e-3, 3e-3]
    fit = fit_link(falling)
    assert fit.bandwidth.value == math.inf
    assert "no estimate of the bandwidth" in fit.caution


def test_time_that_the_model_does_not_describe_is_pointed_out():
    """As on a link that sends short messages faster than its rate."""
    draw = np.random.default_rng(5)
    whole = runs((2, 4), (32, 8, 4), repeats=3, noise=0.05, draw=draw)
    assert "rough" not in fit_link(whole).caution
    whole.loc[whole["bits"] == 32, "comm_s"] *= 4
    assert "both values are rough" in fit_link(whole).caution


def test_a_bandwidth_without_an_upper_bound_shows_its_lower_one():
    open_ended = LinkFit(Estimate(2e-5, 1e-5, 3e-5), Estimate(2.39e11, 6.2e9), 0.1, 3)
    assert "239 GB/s (6.20 GB/s or more) per rank" in link_sentence(open_ended)
    none = LinkFit(Estimate(2e-5), Estimate(math.inf), 0.1, 3)
    assert "20 µs per message and unbounded per rank" in link_sentence(none)


def test_messages_are_counted_per_reduction_where_those_are_recorded():
    fused = runs((2, 4, 8), (32, 4), latency=40e-6)
    fused["reductions_per_step"] = 4.0
    assert fit_link(fused).latency_s.value == pytest.approx(10e-6, rel=1e-6)
    fused["reductions_per_step"] = math.nan
    fit = fit_link(fused)
    assert fit.latency_s.value == pytest.approx(40e-6, rel=1e-6)
    assert "not recorded" in fit.caution


def test_a_study_with_its_communication_recorded_has_a_link_and_one_without_has_none():
    assert analyse(metered_attempts(study())).cases[0].link.points == 3
    silent = [metered(p, speed=9.0, comm_s=None, comm_time_s=None) for p in plan(study())]
    assert analyse(silent).cases[0].link is None
