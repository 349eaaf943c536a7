#!/usr/bin/env python3
"""Print tables of the measurements of run.py, as Markdown.

    compare.py ../results/end-to-end-*.json               # speed relative to gloo's DDP in float32
    compare.py --table speeds ../results/end-to-end-*.json
    compare.py --page ../results/end-to-end-*.json        # all other tables, as a page
    compare.py --brief ../results/end-to-end-*.json       # the ratios in short, by network

Ratios are medians over turns; both times of a ratio are from the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

Record = dict[str, Any]

BASE = "gloo DDP fp32"
PEERS = (BASE, "gloo DDP fp16", "gloo DDP PowerSGD 1", "gloo DDP PowerSGD 2")
ALONE = "no exchange"
OURS = ("engine fp32", "engine 8 bit", "engine 4 bit", "engine top 1%", "DDP hook 4 bit")
EXCHANGING = (*PEERS, *OURS)
RIVALS = EXCHANGING[1:]
RACED = ("engine 4 bit", "engine top 1%")  # against the best peer
RATES = ("memory", "100 Mb/s", "1 Gb/s", "10 Gb/s")
TASKS = ("MNIST", "ResNet", "LSTM")


def ratio(slow: Record, fast: Record) -> float:
    """Return the speed of the second row relative to the first, as the median over turns."""
    pairs = zip(slow["samples_s"], fast["samples_s"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def by_name(record: Record) -> dict[str, Record]:
    """Return a record's rows by contestant."""
    return {row["what"]: row for row in record["rows"]}


def network(record: Record) -> str:
    """Return the network and its batch size."""
    return f"{record['task']}, batch {record['batch']}"


def share(record: Record) -> float:
    """Return the share of the exchange in a step of DDP in float32."""
    rows = by_name(record)
    return 1 - ratio(rows[BASE], rows[ALONE]) ** -1


def best_peer(record: Record) -> Record:
    """Return the row of the fastest contestant of other packages."""
    rows = by_name(record)
    return min((rows[what] for what in PEERS if what in rows), key=lambda row: row["median_s"])


def times(record: Record, slow: Record, whom: Iterable[str]) -> list[str]:
    """Return the speeds of these contestants relative to a row."""
    rows = by_name(record)
    return [f"{ratio(slow, rows[what]):.2f}" for what in whom]


def over_base(record: Record, whom: Iterable[str]) -> list[str]:
    """Return the exchange's share, and the speeds of these relative to DDP in float32."""
    return [f"{share(record):.0%}", *times(record, by_name(record)[BASE], whom)]


def ratios(record: Record) -> list[str]:
    """Return all speeds relative to DDP in float32, and this package's to the best peer."""
    return over_base(record, RIVALS) + times(record, best_peer(record), RACED)


Table = tuple[list[str], Callable[[Record], list[str]]]


def per_second(row: Record) -> str:
    """Return a row's images or words per second, with three digits or more."""
    return f"{row['per_s']:,.{0 if row['per_s'] >= 100 else 1}f}"


def of_each(whom: tuple[str, ...], value: Callable[[Record], str]) -> Table:
    """Return a table with a column for each of these contestants."""
    heads = [what.removeprefix("gloo ") for what in whom]
    return heads, lambda record: [value(by_name(record)[what]) for what in whom]


TABLES: dict[str, Table] = {
    "ratios": (
        [
            f"exchange in a step of {BASE}",
            *(what.removeprefix("gloo ") for what in RIVALS),
            *(f"{what} over the best peer" for what in RACED),
        ],
        ratios,
    ),
    "speeds": of_each((ALONE, *EXCHANGING), per_second),
    "exposed": of_each(EXCHANGING, lambda row: f"{1e3 * row['exposed_s']:.1f}"),
    "losses": of_each((ALONE, *EXCHANGING), lambda row: f"{row['loss']:.3f}"),
}

TITLES = {
    "speeds": "Images or words per second, of all ranks",
    "exposed": "Exposed exchange, ms of a step",
    "losses": "Loss after the same steps",
}
PAGE_HEAD = """# Training, end to end: the numbers

What `benchmarks/end_to_end_torch/compare.py --page` makes of the records in this folder;
[how they were measured, and what follows](../README.md#training-end-to-end). *Exposed* is the
time of a step beyond that of no exchange. The losses are means of the last eight batches, of few
steps: they only reveal a contestant that does not train; [accuracies](../README.md#accuracy)
are measured elsewhere.
"""


def order(record: Record) -> tuple[int, int, bool, int]:
    """Return the key that sorts by network, batch, place and rate."""
    task = next(i for i, name in enumerate(TASKS) if name in record["task"])
    rate = next(i for i, name in enumerate(RATES) if name in record["where"])
    return task, record["batch"], record["ranks"] > 2, rate


def table(records: list[Record], name: str) -> str:
    """Return one table."""
    heads, make = TABLES[name]
    lines = [[network(r), r["where"], *make(r)] for r in sorted(records, key=order)]
    return markdown(["network", "where", *heads], lines)


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table for a page."""
    rows = [f"| {' | '.join(line)} |" for line in (heads, *lines)]
    return "\n".join([rows[0], "|---" * len(heads) + "|", *rows[1:]])


BRIEF = {
    "gloo DDP fp16": "fp16",
    "gloo DDP PowerSGD 1": "PowerSGD 1",
    "gloo DDP PowerSGD 2": "PowerSGD 2",
    "engine 8 bit": "8 bits",
    "engine 4 bit": "4 bits",
    "engine top 1%": "top 1%",
    "DDP hook 4 bit": "hook, 4 bits",
}


def brief(records: list[Record]) -> str:
    """Return speeds relative to DDP in float32: a short table for each network."""
    tables = []
    for task, mine in groupby(sorted(records, key=order), key=lambda record: record["task"]):
        lines = [[place(record), *over_base(record, BRIEF)] for record in mine]
        tables.append(markdown([task, "exchange", *BRIEF.values()], lines))
    return "\n\n".join(tables)


def place(record: Record) -> str:
    """Return the batch and the location of the ranks, without the network."""
    return f"batch {record['batch']}, {record['where'].removeprefix('2 ranks in ')}"


def page(records: list[Record]) -> str:
    """Return a page with the tables of measured values."""
    parts = [PAGE_HEAD]
    parts += [f"## {title}\n\n{table(records, name)}\n" for name, title in TITLES.items()]
    return "\n".join(parts)


def main() -> None:
    """Print one table or several."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--table", choices=TABLES, default="ratios")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.records]
    if args.page:
        print(page(records), end="")
    else:
        print(brief(records) if args.brief else table(records, args.table))


if __name__ == "__main__":
    main()
