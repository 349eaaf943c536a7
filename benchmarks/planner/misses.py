#!/usr/bin/env python
"""Measure the extra time of the planner's choice over the fastest, by ranks, network and size.

    python benchmarks/planner/misses.py            # ten minutes, with nothing else running
    python benchmarks/planner/misses.py --show     # only the tables of the last measurement

Each job measures its machine, plans every size, and times every choice (qsgd-hpc bench --explain).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from qsgd_hpc.bench.allreduce import Choice, Verdict, judge  # noqa: E402
from qsgd_hpc.bench.words import size_text, time_text  # noqa: E402

RANKS = (2, 3, 4)
NETWORKS = {"shared memory": None, "10 Gb/s": "10gbit", "1 Gb/s": "1gbit"}
SIZES = "4K:256M:16"
RESULTS = ROOT / "benchmarks" / "results" / "planner.json"
CLOSE = 0.05
"""A plan that takes at most this share longer counts as good."""


def measure(ranks: int, network: str | None, sizes: str, seconds: float) -> dict[str, Any]:
    """Return the record of a job's measurements."""
    found = RESULTS.with_suffix(".part")
    words = ["-np", str(ranks), "--explain", "--trial", "--sizes", sizes, "--seconds", str(seconds)]
    words += ["--network", network] if network else []
    command = [sys.executable, "-m", "qsgd_hpc", "bench", "allreduce", *words, "--json", str(found)]
    subprocess.run(command, check=True)
    record: dict[str, Any] = json.loads(found.read_text())
    found.unlink()
    return record


def verdicts(record: dict[str, Any]) -> Iterator[tuple[int, Verdict]]:
    """Yield each size of a job with the plan and the fastest choice."""
    rows = [dict(row) for row in record["choices"]]
    for size_bytes, group in groupby(rows, key=lambda row: row.pop("size_bytes")):
        yield size_bytes, judge([Choice(**row) for row in group])


def table(records: list[dict[str, Any]]) -> str:
    """Return the plans and their misses as Markdown."""
    heads = [f"{r['ranks']} ranks, {r['where']}" for r in records]
    columns = [dict(verdicts(record)) for record in records]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for size_bytes in columns[0]:
        cells = [_cell(column[size_bytes]) for column in columns]
        lines.append(f"| {size_text(size_bytes)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(verdict: Verdict) -> str:
    planned = verdict.planned
    assert planned.measured_s is not None
    text = f"{planned.code} {planned.algorithm} {time_text(planned.measured_s)}"
    if verdict.miss <= CLOSE:
        return text
    return f"{text}, **+{verdict.miss:.0%}** on {verdict.fastest.code} {verdict.fastest.algorithm}"


def summary(records: list[dict[str, Any]]) -> str:
    """Summarise the plans in one sentence."""
    misses = [verdict.miss for record in records for _, verdict in verdicts(record)]
    close = sum(miss <= CLOSE for miss in misses)
    return (
        f"{close} of {len(misses)} plans are within {CLOSE:.0%} of the fastest choice; "
        f"the worst takes {max(misses):.0%} longer."
    )


def measure_all(sizes: str, seconds: float) -> None:
    """Measure every layout, and write the results after each."""
    records = []
    for where, network in NETWORKS.items():
        for ranks in RANKS:
            click.echo(f"== {ranks} ranks, {where}")
            records.append({**measure(ranks, network, sizes, seconds), "where": where})
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")


@click.command()
@click.option("--show", is_flag=True, help="Print the tables of the last measurement.")
@click.option("--sizes", default=SIZES, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="For all choices of one size.")
def main(show: bool, sizes: str, seconds: float) -> None:
    """Measure, keep the raw numbers, and print the tables."""
    if not show:
        measure_all(sizes, seconds)
    records = json.loads(RESULTS.read_text())
    for _, group in groupby(records, key=lambda record: record["where"]):
        click.echo(f"{table(list(group))}\n")
    click.echo(summary(records))


if __name__ == "__main__":
    main()
