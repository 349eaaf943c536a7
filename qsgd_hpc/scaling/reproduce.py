"""``qsgd-hpc reproduce``: compares published tables with predictions, or measurements here.

The tables are scaling/published/*.yaml, each with its source and assumptions, and the method by
which its numbers are predicted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.define.study import PLAIN_BITS
from qsgd_hpc.scaling.predict.fabric import Fabric, fabric_of_site, flat_fabric
from qsgd_hpc.scaling.predict.inputs import TrainingProfile, measured
from qsgd_hpc.scaling.predict.model import ClosedForm, Setting, predict_one
from qsgd_hpc.scaling.predict.output import LABEL
from qsgd_hpc.scaling.store import is_number
from qsgd_hpc.scaling.units import bits_name

__all__ = ["reproduce"]

NAMES = ("qsgd-tf", "horovod", "alcf", "tacc", "texar")


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
                published_here = (float(r[3]) for r in table.rows if r[:3] == (what, bits, ranks))
                setting = f"{bits_name(bits)}, {ranks}"
                cells.append(
                    Cell(what, setting, next(published_here, None), median(values), "measured")
                )
    return cells


def _quantities(table: Published) -> list[tuple[str, str]]:
    """Return the quantities of the table, each with the field of a record that contains it."""
    if table.method != "none":
        return [(network, "throughput") for network in table.networks]
    return [("valid", "perplexity"), ("test", "test_perplexity"), ("train", "train_perplexity")]


PIECES = 100
"""Number of gradients of a network whose layers are not listed."""


@dataclass(frozen=True)
class Cell:
    """One published number and the number that it is compared with.

    Attributes:
        what: the network, or the quality.
        setting: bits and size as text.
        published: the number; None for an unpublished setting.
        found: the predicted or measured number; None if there is none.
        role: origin of `found`: "calibrated" (from `published`), "predicted", "measured", or "".
        part_published, part_found: the communication in them; None if unknown.
    """

    what: str
    setting: str
    published: float | None
    found: float | None = None
    role: str = ""
    part_published: float | None = None
    part_found: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of `found`; None if it is calibrated or a number is missing."""
        if self.found is None or not self.published or self.role == "calibrated":
            return None
        return self.found / self.published - 1


@dataclass(frozen=True)
class Published:
    """One file of scaling/published; ``facts`` holds its other keys."""

    name: str
    title: str
    source: str
    quantity: str
    method: str
    networks: Mapping[str, Mapping[str, Any]]
    rows: tuple[tuple[Any, ...], ...]
    assumptions: tuple[str, ...]
    misses: tuple[str, ...]
    facts: Mapping[str, Any]


@cache
def published(name: str) -> Published:
    """Return a published table by its name in NAMES.

    Raises:
        UsageError: there is none with that name.
    """
    if name not in NAMES:
        raise UsageError(f"no published table {name!r}; available: {', '.join(NAMES)}.")
    text = data("scaling").joinpath("published", f"{name}.yaml").read_text(encoding="utf-8")
    body: dict[str, Any] = yaml.safe_load(text)
    return Published(
        name,
        **{key: body.pop(key) for key in ("title", "source", "quantity", "method", "networks")},
        rows=tuple(tuple(row) for row in body.pop("rows")),
        assumptions=tuple(body.pop("assumptions")),
        misses=tuple(body.pop("misses")),
        facts=body,
    )


def network_profile(
    table: Published, network: str, compute_s: float, *, overlaps: bool = True
) -> TrainingProfile:
    """Return the training of one network of a table, with the table's batch size.

    Without overlap there is one gradient. Otherwise the gradients are the layers that the file
    lists, with their positions in the backward pass, or equal pieces at equal intervals.
    """
    facts = table.networks[network]
    backward_s = compute_s * float(table.facts.get("backward", 0))
    if not overlaps:
        layers: list[tuple[int, float]] = [(int(facts["parameters"]), 0.0)]
    elif "layers" in facts:
        layers = [(int(count), place * backward_s) for count, place in facts["layers"]]
    else:
        piece = int(facts["parameters"]) // PIECES
        layers = [(piece, backward_s * i / (PIECES - 1)) for i in range(PIECES)]
    return TrainingProfile(
        name=network,
        compute_s=compute_s,
        backward_s=backward_s,
        layers=tuple(layers),
        batch=float(table.facts["batch"]),
        unit="images",
        source=table.source,
    )


HOUR_S = 3600.0


def predicted(table: Published) -> tuple[list[Cell], list[str]]:
    """Return every published number with the model's, and remarks on the calibration."""
    return _METHODS[table.method](table)


def effective_gbps(
    training: TrainingProfile, nodes: int, latency_us: float, comm_s: float
) -> float:
    """Return the rate of a link on which a float32 step communicates for comm_s; Gb/s.

    The model's time is affine in the time per byte, so two points determine it.
    """
    setting = Setting(overlaps=False)

    def model_s(gbps: float) -> float:
        fabric = flat_fabric("link", gbps, latency_us)
        return predict_one(training, fabric, setting, nodes, PLAIN_BITS, ClosedForm()).exposed_s

    fixed_s = model_s(1e9)
    return (model_s(1.0) - fixed_s) / (comm_s - fixed_s)


def _calibrated(table: Published) -> tuple[list[Cell], list[str]]:
    """Calibrate computing and link of each network with one row; predict the other rows."""
    images, batch = table.facts["images"], table.facts["batch"]
    setting = Setting(overlaps=False)
    cells, remarks = [], []
    for network in table.networks:
        rows = [row for row in table.rows if row[0] == network]
        _, _, base_gpus, total_h, comm_h = next(row for row in rows if row[1] == PLAIN_BITS)
        base_steps = images / (base_gpus * batch)
        compute_s = (total_h - comm_h) * HOUR_S / base_steps
        training = network_profile(table, network, compute_s, overlaps=False)
        gbps = effective_gbps(
            training, base_gpus, table.facts["latency_us"], comm_h * HOUR_S / base_steps
        )
        remarks.append(
            f"{network}: {compute_s:.3g} s of computing per step, {gbps:.3g} Gb/s per GPU."
        )
        fabric = flat_fabric(f"{network}'s link", gbps, table.facts["latency_us"])
        for _, bits, gpus, hours, part in rows:
            row = predict_one(training, fabric, setting, gpus, bits, ClosedForm())
            steps = images / (gpus * batch)
            base = bits == PLAIN_BITS and gpus == base_gpus
            cells.append(
                Cell(
                    network,
                    f"{bits_name(bits)}, {gpus} GPUs",
                    hours,
                    row.step_s * steps / HOUR_S,
                    "calibrated" if base else "predicted",
                    part,
                    row.exposed_s * steps / HOUR_S,
                )
            )
    return cells, remarks


def _cluster(table: Published) -> tuple[list[Cell], list[str]]:
    """Predict efficiency at one size from published speeds of one processor, also compressed."""
    facts = table.facts
    fabric = flat_fabric(table.title, facts["gbps"], facts["latency_us"], facts["memory_gbs"])
    cells = []
    for network, _, gpus, efficiency in table.rows:
        compute_s = facts["batch"] / table.networks[network]["images_per_s"]
        training = network_profile(table, network, compute_s)
        for words, bits, algorithm in facts["runs"]:
            setting = Setting(ranks_per_node=facts["ranks_per_node"], algorithm=algorithm)
            row = predict_one(training, fabric, setting, facts["nodes"], bits, ClosedForm())
            theirs = bits == PLAIN_BITS and algorithm == "ring"
            cells.append(
                Cell(
                    network,
                    f"{words}, {gpus} GPUs",
                    efficiency if theirs else None,
                    row.efficiency,
                    "predicted",
                )
            )
    return cells, []


def _speeds(table: Published, fabric: Fabric) -> tuple[list[Cell], list[str]]:
    """Predict throughput at each size from the published throughput of one processor."""
    single = {row[0]: row[3] for row in table.rows if row[2] == 1}
    cells = []
    for network, bits, ranks, speed in table.rows:
        training = network_profile(table, network, table.facts["batch"] / single[network])
        per_node = min(int(table.facts["ranks_per_node"]), ranks)
        setting = Setting(ranks_per_node=per_node)
        row = predict_one(training, fabric, setting, ranks // per_node, bits, ClosedForm())
        role = "calibrated" if ranks == 1 else "predicted"
        cells.append(Cell(network, f"{bits_name(bits)}, {ranks}", speed, row.throughput, role))
    return cells, []


def _site(table: Published) -> tuple[list[Cell], list[str]]:
    # The published speed of one GPU includes its copies between GPU and host memory, if any.
    fabric = replace(fabric_of_site(sites.load(table.facts["site"])), host_bandwidth=None)
    return _speeds(table, fabric)


def _link(table: Published) -> tuple[list[Cell], list[str]]:
    return _speeds(table, flat_fabric(table.title, table.facts["gbps"], table.facts["latency_us"]))


def _none(table: Published) -> tuple[list[Cell], list[str]]:
    return [
        Cell(what, f"{bits_name(bits)}, {ranks}", value) for what, bits, ranks, value in table.rows
    ], []


_METHODS: dict[str, Callable[[Published], tuple[list[Cell], list[str]]]] = {
    "calibrated": _calibrated,
    "cluster": _cluster,
    "site": _site,
    "link": _link,
    "none": _none,
}


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
