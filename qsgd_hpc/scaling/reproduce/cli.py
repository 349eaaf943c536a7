"""``qsgd-hpc reproduce``: compares published tables with predictions, or measurements here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.inputs import measured
from qsgd_hpc.scaling.predict.output import LABEL
from qsgd_hpc.scaling.reproduce.published import NAMES, Cell, Published, predicted, published
from qsgd_hpc.scaling.store.attempts import is_number
from qsgd_hpc.scaling.units import bits_name

__all__ = ["measured_cells", "reproduce", "study_text"]


@click.command(context_settings={"show_default": True})
@click.argument("name", type=click.Choice(NAMES))
@click.option("--measure", is_flag=True, help="Measure a similar training on this machine (slow).")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="Folder of an earlier study, of --measure or of `scale`.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("reproduce"),
    help="Output folder of --measure.",
)
@click.option("--json", "as_data", is_flag=True, help="Print JSON.")
def reproduce(name: str, measure: bool, results: Path | None, output: Path, as_data: bool) -> None:
    """Compare each number of a published table with a prediction, or a measurement here.

    \b
      qsgd-hpc reproduce qsgd-tf
      qsgd-hpc reproduce texar --measure
    """
    table = published(name)
    if measure:
        results = run_study(table, output / name)
    cells, remarks = predicted(table)
    here = measured_cells(table, results) if results else []
    if as_data:
        click.echo(json.dumps(_data(table, cells, here, remarks), indent=1))
        return
    for line in _lines(table, cells, here, remarks):
        click.echo(line)


def _data(
    table: Published, cells: Sequence[Cell], here: Sequence[Cell], remarks: Sequence[str]
) -> dict[str, Any]:
    return {
        "title": table.title,
        "source": table.source,
        "quantity": table.quantity,
        "label": LABEL,
        "cells": [{**asdict(c), "error": c.error} for c in cells],
        "measured": [{**asdict(c), "error": c.error} for c in here],
        "calibration": list(remarks),
        "assumptions": list(table.assumptions),
        "misses": list(table.misses),
    }


def _lines(
    table: Published, cells: Sequence[Cell], here: Sequence[Cell], remarks: Sequence[str]
) -> list[str]:
    lines = [table.title, f"published: {table.source}", f"shown: {table.quantity}"]
    if any(cell.found is not None for cell in cells):
        lines.append(f"{LABEL}; calibrated numbers are derived from the published one next to them")
    lines += ["", *_table(cells)]
    errors = [abs(cell.error) for cell in cells if cell.error is not None]
    if errors:
        mean = sum(errors) / len(errors)
        lines.append(
            f"{len(errors)} predictions with a published number: error {mean:.0%} on average, "
            f"{max(errors):.0%} at most"
        )
    if here:
        lines += ["", "MEASURED on this machine, not on the published one", *_table(here)]
    networks = [f"{n}: {f['source']}" for n, f in table.networks.items() if "source" in f]
    for head, sentences in (
        ("Calibration", remarks),
        ("Networks", networks),
        ("Assumptions", table.assumptions),
        ("Largest errors", table.misses),
    ):
        if sentences:
            lines += ["", head, *(f"  - {sentence}" for sentence in sentences)]
    return lines


def _table(cells: Sequence[Cell]) -> list[str]:
    width = max(len(f"{c.what}, {c.setting}") for c in cells)
    lines = [f"{'':<{width}}  {'published':>15} {'here':>15} {'error':>7}"]
    for c in cells:
        error = "" if c.error is None else f"{c.error:+.0%}"
        lines.append(
            f"{f'{c.what}, {c.setting}':<{width}}  {_number(c.published, c.part_published):>15} "
            f"{_found(c.found, c.part_found):>15} {error:>7}  {c.role}".rstrip()
        )
    return lines


def _number(value: float | None, part: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if part is None else f"{value:.2f} ({part:.2f})"


def _found(value: float | None, part: float | None) -> str:
    """Return a number of this project to three digits, which is its accuracy."""
    if value is None or part is not None:
        return _number(value, part)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def study_text(table: Published) -> str:
    """Return the text of the study file for a table.

    Raises:
        UsageError: nothing of the table can be measured on one machine.
    """
    if "measure" not in table.facts:
        raise UsageError(
            f"{table.name}: it cannot be measured here. Measure a training of your own with "
            "`qsgd-hpc scale` and predict from it with `qsgd-hpc predict`."
        )
    study: str = yaml.safe_dump(dict(table.facts["measure"]), sort_keys=False)
    return f"# After: {table.title}\n{study}"


def run_study(table: Published, folder: Path) -> Path:
    """Run a table's study with `qsgd-hpc scale` and return its results folder; may take long."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{table.name}.yaml"
    file.write_text(study_text(table), encoding="utf-8")
    results = folder / "results"
    ended = subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", "scale", str(file), "-o", str(results)], check=False
    )
    if ended.returncode != 0:
        raise UsageError(
            f"{table.name}: `qsgd-hpc scale {file}` ended with {ended.returncode}; see its "
            "output. Run the same command again to resume."
        )
    return results


def measured_cells(table: Published, results: Path) -> list[Cell]:
    """Return each size of a study of this machine, with the published number of that size.

    Raises:
        UsageError: the table has other quantities, or several networks.
    """
    study_text(table)
    points, _ = measured(results)
    cells = []
    for ranks, bits in sorted({(int(p["ranks"]), int(p["bits"])) for p in points}):
        here = [p for p in points if p["ranks"] == ranks and p["bits"] == bits]
        for what, name in _quantities(table):
            values = [float(p[name]) for p in here if is_number(p.get(name))]
            if values:
                value = _published(table, what, ranks, bits)
                setting = f"{bits_name(bits)}, {ranks}"
                cells.append(Cell(what, setting, value, median(values), "measured"))
    return cells


def _quantities(table: Published) -> list[tuple[str, str]]:
    """Return the quantities of the table, each with the field of a record that contains it."""
    if table.method != "none":
        return [(network, "throughput") for network in table.networks]
    return [("valid", "perplexity"), ("test", "test_perplexity"), ("train", "train_perplexity")]


def _published(table: Published, what: str, ranks: int, bits: int) -> float | None:
    found = [row[3] for row in table.rows if row[:3] == (what, bits, ranks)]
    return float(found[0]) if found else None


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
