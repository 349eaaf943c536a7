"""Comparison of the larger sizes of a study with predictions from its smallest size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.inputs import Measured, training_of
from qsgd_hpc.scaling.predict.model import Network, Setting, predict
from qsgd_hpc.scaling.store.attempts import is_number

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """One size: step times in seconds, and the relative error of the prediction.

    Attributes:
        spread: largest relative distance of a repeat from the median; None for a single run. A
            smaller error may be due to the measurement.
    """

    nodes: int
    ranks: int
    bits: int
    by: str
    measured_s: float
    predicted_s: float
    spread: float | None = None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def compare(
    points: Sequence[Measured],
    mode: str,
    fabric: Fabric,
    networks: Sequence[Network],
    source: str,
    setting: Setting,
) -> list[Comparison]:
    """Return the measurement and the prediction of every size above the smallest one.

    The step time is the mean over timed steps of computing, exposed communication and waiting for
    data together. Coding costs are taken from the study itself.

    Raises:
        UsageError: there is only one size, or values are missing.
    """
    training = training_of(points, mode, source)
    larger = sorted(
        {(int(p["nodes"]), int(p["ranks"])) for p in points if p["ranks"] > training.ranks}
    )
    if not larger:
        raise UsageError(
            f"{source} has one size; a validation needs a larger one. Measure --nodes 1,2,4."
        )
    found = []
    for nodes, ranks in larger:
        chosen = [p for p in points if p["nodes"] == nodes and p["ranks"] == ranks]
        for bits in sorted({int(p["bits"]) for p in chosen}, reverse=True):
            times = [s for p in chosen if p["bits"] == bits if (s := _step_s(p)) is not None]
            if not times:
                continue
            here = replace(setting, ranks_per_node=ranks // nodes, mode=mode)
            middle = median(times)
            spread = max(abs(s / middle - 1) for s in times) if len(times) > 1 else None
            for network in networks:
                row = predict(training, fabric, here, [nodes], [bits], network)[0]
                found.append(
                    Comparison(nodes, ranks, bits, network.name, middle, row.step_s, spread)
                )
    return found


def _step_s(point: Measured) -> float | None:
    # The engine's mean step includes the tests between epochs, which are not predicted.
    for name in ("step_s",) if point.get("source") == "engine" else ("step_mean_s", "step_s"):
        if is_number(point.get(name)):
            return float(point[name])
    throughput, batch = point.get("throughput"), point.get("global_batch_size")
    if is_number(throughput) and is_number(batch) and throughput > 0:
        return batch / throughput
    return None
