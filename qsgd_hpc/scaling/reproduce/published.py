"""Published tables as data: scaling/published/*.yaml, each with its source and assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from qsgd_hpc._data import data
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.inputs import TrainingProfile

__all__ = ["NAMES", "Cell", "Published", "network_profile", "published"]

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
