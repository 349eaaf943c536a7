"""From samples to rows, lines and JSON; of --explain, predictions beside measurements."""

from __future__ import annotations

import json

import pytest

from qsgd_hpc.bench import allreduce, codec, table
from qsgd_hpc.bench.allreduce import Choice
from qsgd_hpc.bench.table import Row, Timing, compare, row_json

MIB = 1 << 20


def row(what, seconds, **more):
    return Row(4 * MIB, what, more.pop("algorithm", ""), Timing.of([seconds] * 3), 4, **more)


def rows():
    return [
        row("fp32", 0.012, algorithm="direct", wire_bytes=6 * MIB, limit_s=0.010, nmse=1e-15),
        row("4 bit", 0.002, algorithm="sra", wire_bytes=MIB, limit_s=0.001, is_exact=False),
        row("MPI_Allreduce", 0.010, is_peer=True),
        row("gloo fp16", 0.006, is_peer=True, is_exact=False),
    ]


def test_timing_tells_least_middle_and_tail():
    timing = Timing.of([float(i) for i in range(200, 0, -1)])
    assert (timing.min_s, timing.median_s, timing.samples) == (1.0, 100.5, 200)
    assert timing.p99_s == 199.0
    assert Timing.of([3.0, 1.0]).p99_s == 3.0


def test_bandwidths_are_those_of_nccl_tests():
    fp32 = rows()[0]
    assert fp32.algbw_gb_per_s == pytest.approx(4 * MIB / 0.012 / 1e9)
    assert fp32.busbw_gb_per_s == pytest.approx(1.5 * fp32.algbw_gb_per_s)
    assert fp32.over_limit == pytest.approx(1.2)


def test_ours_are_compared_with_the_best_peer_that_sends_float32():
    compared = compare(rows())
    assert [r.speedup for r in compared] == [pytest.approx(10 / 12), pytest.approx(5.0), None, None]
    assert compare(rows()[:2]) == rows()[:2]


def test_lines_fit_their_heads():
    text = [table.line(r, first=i == 0).plain for i, r in enumerate(compare(rows()))]
    head = table.header().plain
    assert " ".join(text[0].split()) == (
        "4 M fp32 direct 12 ms 12 ms 12 ms 0.350 0.524 6 M 1.20 1.0e-15 0.83x"
    )
    assert text[1].startswith(" " * 10 + "4 bit")
    assert text[2].split()[:3] == ["MPI_Allreduce", "-", "10"]
    assert all(len(line) <= len(head) for line in text)
    for name in ("what", "algorithm"):  # left-aligned columns begin under their heads
        at = head.index(name)
        assert all(line[at] != " " and line[at - 1] == " " for line in text)
    assert text[0].endswith("0.83x")
    assert len(text[0]) == len(head)


def test_a_row_survives_json():
    found = json.loads(json.dumps(row_json(compare(rows())[1])))
    assert found["what"] == "4 bit"
    assert found["median_s"] == 0.002
    assert found["samples"] == 3
    assert found["over_limit"] == pytest.approx(2.0)
    assert found["speedup"] == pytest.approx(5.0)
    assert found["busbw_gb_per_s"] == pytest.approx(1.5 * found["algbw_gb_per_s"])


def operation(name, seconds, code="", threads=1):
    return codec.Operation(name, lambda: None, code, threads, [seconds])


def test_codecs_are_held_against_what_they_must_do_at_least():
    found = [
        operation(codec.SCAN, 1.0),
        operation(codec.ADD, 2.0),
        operation("encode", 1.25, "c"),
        operation("decode and add", 1.6, "c"),
        operation("encode", 0.625, "c", threads=2),
        operation("encode", 0.625, "other", threads=2),
    ]
    beside = [codec.ratio(o, found) for o in found]
    assert beside[:2] == [None, None]
    assert beside[2:5] == [(0.8, codec.SCAN), (1.25, codec.ADD), (2.0, "1 thread")]
    assert beside[5] is None  # was not measured on one thread
    request = codec.Request(10**9, [], [1, 2])
    records = codec.rows(request, found)
    assert records[2]["gb_per_s"] == pytest.approx(0.8)
    assert codec.line(records[2]).plain.endswith("0.80 of max-abs scan")
    assert codec.line(records[4]).plain.endswith("2.00 times 1 thread")
    assert json.loads(json.dumps(records)) == records


FP32 = Choice("fp32", "direct", predicted_s=100e-6, measured_s=120e-6)
FOUR = Choice("4 bit", "sra", predicted_s=90e-6, measured_s=108e-6, planned=True)
TWO = Choice("2 bit", "sra", predicted_s=95e-6, measured_s=100e-6)
FAR = Choice("fp32", "ring", predicted_s=900e-6)


def choices(*rows):
    return [line.plain for line in allreduce.choice_lines(1 << 20, rows)]


def test_a_plan_misses_by_what_it_takes_longer_than_the_fastest():
    verdict = allreduce.judge([FP32, FOUR, TWO, FAR])
    assert (verdict.planned, verdict.fastest) == (FOUR, TWO)
    assert verdict.miss == pytest.approx(0.08)
    assert allreduce.judge([FP32, FOUR]).miss == 0


def test_rows_come_by_what_was_measured_and_the_untried_last():
    fast, planned, exact, untried, sentence, _ = choices(FAR, FP32, FOUR, TWO)
    assert fast.split() == ["1", "M", "2", "bit", "sra", "95", "us", "100", "us", "+5%"]
    assert planned.split() == ["4", "bit", "sra", "90", "us", "108", "us", "+20%", "planned"]
    assert exact.split() == ["fp32", "direct", "100", "us", "120", "us", "+20%"]
    assert untried.split() == ["fp32", "ring", "900", "us", "-", "-"]
    assert sentence.strip() == "planned: 4 bit by sra, 8.0% behind the fastest, 2 bit by sra"
    assert choices(FOUR, FP32)[-2].strip() == "planned: 4 bit by sra, which is the fastest"


def test_cells_stand_under_their_names():
    names, row = allreduce.choice_header().plain, choices(FOUR)[0]
    for name in ("predicted", "measured", "error"):
        end = names.index(name) + len(name)
        assert row[end - 1] != " "
        assert row[end : end + 1] in ("", " ")


def test_json_has_what_the_table_shows():
    found = allreduce.choice_json(4096, FOUR)
    assert found == {
        "size_bytes": 4096,
        "code": "4 bit",
        "algorithm": "sra",
        "predicted_s": 90e-6,
        "measured_s": 108e-6,
        "planned": True,
    }
