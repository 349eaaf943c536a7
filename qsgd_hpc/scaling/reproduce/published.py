"""Published tables as data, and predictions for their numbers by the method of each table.

The tables are scaling/published/*.yaml, each with its source and assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.define.plan import PLAIN_BITS
from qsgd_hpc.scaling.predict.fabric import Fabric, fabric_of_site, flat_fabric
from qsgd_hpc.scaling.predict.inputs import TrainingProfile
from qsgd_hpc.scaling.predict.model import ClosedForm, Setting, predict
from qsgd_hpc.scaling.units import bits_name

__all__ = [
    "NAMES",
    "Cell",
    "Published",
    "effective_gbps",
    "network_profile",
    "predicted",
    "published",
]

NAMES = ("qsgd-tf", "horovod", "alcf", "tacc", "texar")
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
        row = predict(training, fabric, setting, [nodes], [PLAIN_BITS], ClosedForm())[0]
        return row.exposed_s

    fixed_s = model_s(1e9)
    return (model_s(1.0) - fixed_s) / (comm_s - fixed_s)


def _calibrated(table: Published) -> tuple[list[Cell], list[str]]:
    """Calibrate computing and link of each network with one row; predict the other rows."""
    images, batch = table.facts["images"], table.facts["batch"]
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
            row = predict(training, fabric, Setting(overlaps=False), [gpus], [bits], ClosedForm())[
                0
            ]
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
            row = predict(training, fabric, setting, [facts["nodes"]], [bits], ClosedForm())[0]
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
        row = predict(training, fabric, setting, [ranks // per_node], [bits], ClosedForm())[0]
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
