"""Measurement of a training similar to a published table on this machine, as a study."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import yaml

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.inputs import measured
from qsgd_hpc.scaling.reproduce.published import Cell, Published
from qsgd_hpc.scaling.store.attempts import is_number
from qsgd_hpc.scaling.units import bits_name

__all__ = ["measured_cells", "run_study", "study_text"]


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
