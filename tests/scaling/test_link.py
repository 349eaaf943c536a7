"""The fit of latency and bandwidth recovers a link, and owns up where the rows cannot tell."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.fits import fit_link
from qsgd_hpc.scaling.analysis.results import Estimate, LinkFit
from qsgd_hpc.scaling.define.plan import plan
from qsgd_hpc.scaling.report.case_findings import link_sentence
from tests.scaling.samples import PARAMETERS, metered, metered_attempts, study

TRIALS = 100
# 95 % of 100 are 95; 86 or fewer have a probability of 0.1 % (binomial).
COVERED = 87


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
    for _ in range(TRIALS):
        fit = fit_link(runs((2, 4, 8), (32, 8, 4), **where))
        held["latency"] += fit.latency_s.low <= latency <= fit.latency_s.high
        held["bandwidth"] += fit.bandwidth.low <= 1e9 <= (fit.bandwidth.high or math.inf)
    assert min(held.values()) >= COVERED, held


def test_rows_that_cannot_tell_are_owned_up_to():
    assert fit_link(runs((2,), (32,))) is None
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
