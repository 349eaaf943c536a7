"""The table of bench --explain: predictions beside measurements, and what the plan misses."""

from __future__ import annotations

import pytest

from qsgd_hpc.bench import explain
from qsgd_hpc.bench.explain import Choice

FP32 = Choice("fp32", "direct", predicted_s=100e-6, measured_s=120e-6)
FOUR = Choice("4 bit", "sra", predicted_s=90e-6, measured_s=108e-6, planned=True)
TWO = Choice("2 bit", "sra", predicted_s=95e-6, measured_s=100e-6)
FAR = Choice("fp32", "ring", predicted_s=900e-6)


def text(*rows):
    return [line.plain for line in explain.lines(1 << 20, rows)]


def test_a_plan_misses_by_what_it_takes_longer_than_the_fastest():
    verdict = explain.judge([FP32, FOUR, TWO, FAR])
    assert (verdict.planned, verdict.fastest) == (FOUR, TWO)
    assert verdict.miss == pytest.approx(0.08)
    assert explain.judge([FP32, FOUR]).miss == 0


def test_rows_come_by_what_was_measured_and_the_untried_last():
    fast, planned, exact, untried, sentence, _ = text(FAR, FP32, FOUR, TWO)
    assert fast.split() == ["1", "M", "2", "bit", "sra", "95", "us", "100", "us", "+5%"]
    assert planned.split() == ["4", "bit", "sra", "90", "us", "108", "us", "+20%", "planned"]
    assert exact.split() == ["fp32", "direct", "100", "us", "120", "us", "+20%"]
    assert untried.split() == ["fp32", "ring", "900", "us", "-", "-"]
    assert sentence.strip() == "planned: 4 bit by sra, 8.0% behind the fastest, 2 bit by sra"
    assert text(FOUR, FP32)[-2].strip() == "planned: 4 bit by sra, which is the fastest"


def test_cells_stand_under_their_names():
    names, row = explain.header().plain, text(FOUR)[0]
    for name in ("predicted", "measured", "error"):
        end = names.index(name) + len(name)
        assert row[end - 1] != " "
        assert row[end : end + 1] in ("", " ")


def test_json_has_what_the_table_shows():
    found = explain.choice_json(4096, FOUR)
    assert found == {
        "size_bytes": 4096,
        "code": "4 bit",
        "algorithm": "sra",
        "predicted_s": 90e-6,
        "measured_s": 108e-6,
        "planned": True,
    }
