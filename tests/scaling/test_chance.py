"""No loss of quality is claimed that chance explains, and no two sentences of a report disagree."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.analysis.quality import compare_quality
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.analysis.stats import enough, proportion_bound, repeats_bound, sample_variance
from qsgd_hpc.scaling.define.study import Case, plan
from qsgd_hpc.scaling.report.findings import findings
from qsgd_hpc.scaling.report.networks import families
from qsgd_hpc.scaling.report.origins import Origins
from qsgd_hpc.scaling.report.report import Report
from qsgd_hpc.scaling.report.terminal import print_result
from tests.scaling.samples import metered, study

TRIALS = 80
# A claim in 5 % of studies is 4 in 80; more than 11 come with probability 0.05 % (binomial).
CLAIMS = 11


def quality(fewer, plain, *, samples=None, comparisons=1, column="test_accuracy"):
    """Compare runs of 4 bit with runs of fp32."""
    values = {4: list(fewer), 32: list(plain)}
    runs = pd.DataFrame(
        [
            {"nodes": 2, "ranks": 2, "bits": bits, column: value}
            for bits, each in values.items()
            for value in each
        ]
    )
    rows = {
        bits: {"nodes": 2, "ranks": 2, "bits": bits, column: float(np.median(each))}
        for bits, each in values.items()
    }
    case = CaseAnalysis(
        Case("train"),
        "images",
        column,
        None,
        runs,
        runs,
        runs,
        (2, 32),
        test_samples=samples,
        comparisons=comparisons,
    )
    return compare_quality(case, rows[4], rows[32])


def trained(draw, mean, seeds, samples, repeats):
    """Draw accuracies of trainings whose seeds differ, each tested on images of its own."""
    true = np.clip(mean + seeds * draw.standard_normal(repeats), 0, 1)
    return true if samples is None else draw.binomial(samples, true) / samples


@pytest.mark.parametrize(
    ("repeats", "samples", "seeds", "comparisons"),
    [
        (1, 297, 0.02, 1),
        (2, 297, 0.02, 1),
        (3, 297, 0.002, 3),
        (3, 10_000, 0.02, 1),
        (3, None, 0.02, 3),
        (5, 1_000, 0.01, 2),
    ],
)
def test_equal_trainings_are_told_apart_in_one_study_of_twenty_at_most(
    repeats, samples, seeds, comparisons
):
    draw, claims = np.random.default_rng(repeats), 0
    for _ in range(TRIALS):
        plain = trained(draw, 0.93, seeds, samples, repeats)
        claims += any(
            quality(
                trained(draw, 0.93, seeds, samples, repeats),
                plain,
                samples=samples,
                comparisons=comparisons,
            ).word
            == "worse"
            for _ in range(comparisons)
        )
    assert claims <= CLAIMS


@pytest.mark.parametrize(("samples", "loss"), [(10_000, 0.02), (None, 0.02), (297, 0.12)])
def test_a_real_loss_is_found_by_six_runs(samples, loss):
    draw, found = np.random.default_rng(1), 0
    for _ in range(50):
        plain = trained(draw, 0.95, 0.005, samples, 6)
        fewer = trained(draw, 0.95 - loss, 0.005, samples, 6)
        found += quality(fewer, plain, samples=samples, comparisons=4).word == "worse"
    assert found >= 45


def test_as_many_runs_or_samples_as_are_said_to_tell_do_tell_in_most_studies():
    draw, loss, seeds = np.random.default_rng(2), 0.01, 0.01
    runs = 1 + enough(2 * seeds**2, loss, comparisons=4)
    pairs = [
        (trained(draw, 0.9, seeds, None, runs), trained(draw, 0.9 - loss, seeds, None, runs))
        for _ in range(200)
    ]
    told = sum(
        repeats_bound(*pair, comparisons=4) < pair[0].mean() - pair[1].mean() for pair in pairs
    )
    assert 130 <= told < 200  # four of five; fewer than 130 come with less than 1 in 10,000
    samples = enough(sample_variance(0.9, 300) + sample_variance(0.89, 300), loss, comparisons=4)
    shares = draw.binomial(samples, [(0.9, 0.89)] * 200) / samples
    told = sum(proportion_bound(a, b, samples=samples, comparisons=4) < a - b for a, b in shares)
    assert 130 <= told < 200


@pytest.mark.parametrize(
    ("fewer", "plain", "more", "word", "clause"),
    [
        # One run of a few hundred images: one image is no loss, and no run tells of forty.
        (
            [0.8653],
            [0.8687],
            {"samples": 297},
            "noise",
            "explains on 297 test images (the test set is",
        ),
        ([0.73], [0.8687], {"samples": 297}, "untold", "more than 297 test images explain"),
        ([0.73], [0.8687], {}, "untold", "−13.87 points of one run each; 3 or more of each"),
        # Repeats of one seed are one run.
        ([0.92] * 3, [0.97] * 3, {}, "untold", "of runs that gave the same value each time"),
        ([0.92] * 3, [0.97] * 3, {"samples": 10_000}, "untold", "more than 10,000 test images"),
        ([0.92, 0.93, 0.91], [0.97, 0.968, 0.972], {}, "worse", "where chance explains ±"),
        ([0.92, 0.98, 0.94], [0.97, 0.95, 0.98], {}, "noise", "runs of each are needed to tell"),
        ([0.92, 0.93, 0.91], [0.97], {}, "untold", "with a single run of one of the two"),
        # What the repeats alone would call a loss, a test set of 100 images explains.
        (
            [0.92, 0.93, 0.91],
            [0.97, 0.968, 0.972],
            {"samples": 100},
            "noise",
            "images are needed to tell",
        ),
        ([0.969], [0.97], {"samples": 100_000}, "kept", ""),
        ([0.99], [0.97], {}, "kept", ""),
        ([118.9], [118.0], {"column": "perplexity"}, "kept", ""),
        ([130.0], [118.0], {"column": "perplexity"}, "untold", "perplexity +12.00 of one run"),
        ([130, 131, 129], [118, 117, 119], {"column": "perplexity"}, "worse", "explains ±"),
        ([130, 117, 121], [118, 110, 119], {"column": "perplexity"}, "noise", "needed to tell"),
        # A divergence is no number.
        ([np.nan, 120.0], [118.0, 119.0], {"column": "perplexity"}, "untold", "1 of its 2 runs"),
    ],
)
def test_what_is_said_of_a_loss(fewer, plain, more, word, clause):
    found = quality(fewer, plain, **more)
    assert found.word == word
    assert clause in found.clause and bool(found.clause) == bool(clause)


def test_more_comparisons_need_more_evidence():
    fewer, plain = [0.955, 0.953, 0.951], [0.963, 0.966, 0.960]
    assert quality(fewer, plain).word == "worse"
    assert quality(fewer, plain, comparisons=20).word == "noise"


SPEEDS = {"slower": 0.7, "equal": 1.0, "faster": 1.5}
COSTS = "(?<!whether it )costs quality"
LOSSES = {"none": 0.0, "an image": 0.0034, "some": 0.02, "a lot": 0.3}
GRID = list(
    itertools.product(
        SPEEDS, SPEEDS, (0.002, 0.2), (1, 3), LOSSES, (0.0, 0.004), (None, 297, 10_000)
    )
)


def reported(slow, fast, noise, repeats, loss, seeds, samples):
    """Return the report of a study on a slow and a fast network, in 4 and 8 bits."""
    whole = study(networks=("100mbit", "10gbit"), bits=(32, 8, 4), nodes=(2,), repeats=repeats)
    draw = np.random.default_rng(7)
    found = []
    for point in plan(whole):
        gain = SPEEDS[slow if point.case.network == "100mbit" else fast]
        fewer = point.bits != 32
        reached = 0.93 - LOSSES[loss] * (point.bits == 4) + seeds * draw.standard_normal()
        made = metered(
            point,
            speed=100 * (gain if fewer else 1) * (1 + noise * (point.repeat - 2)),
            test_accuracy=round(reached * (samples or 1e6)) / (samples or 1e6),
            test_samples=samples,
            nmse=0.05 if fewer else None,
        )
        on = {"event": "network", "network": point.case.network}
        found.append(dataclasses.replace(made, records=(*made.records, on)))
    analysis = analyse(found, cases=whole.cases, site="local")
    told = findings(whole, analysis, machine=None)
    return Report(whole, analysis, told, Origins((), (), None, ()), ())


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 6))]
)
def test_no_two_sentences_of_a_report_disagree(number):
    # 30 of the grid's studies, 5 of them in the gate.
    for chosen in random.Random(number).sample(GRID, 5):
        report = reported(*chosen)
        check(report, repeats=chosen[3], chosen=chosen)


def check(report: Report, *, repeats: int, chosen: object) -> None:
    """Hold every sentence of a report against its verdicts."""
    cases = report.analysis.cases
    (family,) = families(cases)
    sentences = dict(
        re.findall(
            r"At (100 Mb/s|10 Gb/s) (.*?\.)(?= |$)(?=(?: At| It takes| More|$))", family.sentence
        )
    )
    verdicts = {c.case.network_label: [b.verdict for b in c.break_even] for c in cases}
    pays = [network for network, given in verdicts.items() if "yes" in given]
    losing = {
        (c.case.network_label, b.bits)
        for c in cases
        for b in c.break_even
        if "it costs quality" in b.reason
    }
    shown = " ".join((report.findings.headline, report.findings.lead, *lines(report)))
    assert set(sentences) == set(verdicts), (chosen, family.sentence)
    for network, said in sentences.items():
        given = verdicts[network]
        assert ("compressing pays: " in said) == (network in pays), (chosen, said, given)
        if "does not pay" in said:
            assert set(given) == {"no"}, (chosen, said, given)
        if "costs quality (" in said:
            assert any(place == network for place, _ in losing), (chosen, said)
    for case, words in zip(cases, report.findings.cases, strict=True):
        told = " ".join((words.headline, words.lead, words.advice, *words.coded))
        for judged in case.break_even:
            lost = (case.case.network_label, judged.bits) in losing
            assert not (lost and judged.verdict != "no"), (chosen, judged)
            if judged.verdict == "yes":
                assert "gains" not in judged.reason, (chosen, judged)
                assert "of one run each" not in judged.reason, (chosen, judged)
            if limit := re.search(r"the largest possible speed-up is ([\d.]+)×", judged.reason):
                ratio = re.search(r"at ([\d.]+)× the speed", judged.reason)
                assert float(ratio[1]) <= float(limit[1]) + 0.01, (chosen, judged)
            if lost:
                assert f"{judged.bits} bit did cost quality" in told or "not affect" not in told
        if not any(place == case.case.network_label for place, _ in losing):
            assert not re.search(f"did cost quality|{COSTS}", told), (
                chosen,
                told,
            )
    if pays:
        assert f"In {len(pays)} of {len(cases)} cases compressing pays" in shown, chosen
    elif "In none of 2 cases does compressing pay" in shown:
        assert {v for given in verdicts.values() for v in given} == {"no"}, chosen
    if repeats == 1:
        claims = r"pays: |not pay|gains|trains (at|as)|\d× as fast|than fp32"
        claimed = re.search(f"{claims}|{COSTS}", shown)
        assert not claimed, (chosen, claimed)
        assert {v for given in verdicts.values() for v in given} == {"undecided"}, chosen


def lines(report: Report) -> list[str]:
    """Return what the terminal shows."""
    screen = Console(width=400)
    with screen.capture() as caught:
        print_result(screen, report, Path("report.html"))
    return caught.get().splitlines()
