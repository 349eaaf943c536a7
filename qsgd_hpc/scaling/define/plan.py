"""The points of a study and the command of each: pure functions; nothing is started here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.define.study import Case, Study

__all__ = [
    "PLAIN_BITS",
    "Point",
    "counts_for",
    "environment",
    "equal_threads",
    "global_batch",
    "plan",
    "script_args",
]

_ORDER_SEED = "qsgd-hpc scaling order 1"
PLAIN_BITS = 32


@dataclass(frozen=True)
class Point:
    """One measurement: a case with its number of nodes and ranks, bits, and repeat (from 1)."""

    case: Case
    nodes: int
    ranks: int
    bits: int
    repeat: int

    @property
    def key(self) -> str:
        """Name of the point's folder; unique in a study."""
        return f"{self.case.key}-nodes{self.nodes}-bits{self.bits}-repeat{self.repeat}"

    @property
    def label(self) -> str:
        """Words for progress lines, such as '2 nodes, 4 bit'."""
        return f"{units.nodes_name(self.nodes)}, {units.bits_name(self.bits)}"

    def name(self, several: bool) -> str:
        """Return the label with the repeat and, in a study of several cases, with the case."""
        case = f"{self.case.label}: " if several else ""
        return f"{case}{self.label}, repeat {self.repeat}"

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Point:
        """Create a point from the values of :meth:`to_json`, else raise KeyError or TypeError."""
        values: dict[str, Any] = {**body, "case": Case(**body["case"])}
        return cls(**values)


def plan(study: Study) -> tuple[Point, ...]:
    """Return the points of a study in the order of measurement.

    Cases are combined with nodes, bits and repeats. One rank sends nothing, so a point of one rank
    is measured once per program, batch size and repeat: it is labelled 32 bit and with the first
    algorithm, whatever bits and algorithms the study compares. A point of one node is labelled
    with the first network, because it uses none (see :func:`counts_for`). Each repeat is a complete
    round in its own shuffled order: a machine that becomes slower (heat, other users) then affects
    all sizes equally and does not look like scaling. The order depends only on the points, so a
    resumed study continues in the same order.
    """
    points: list[Point] = []
    for repeat in range(1, study.repeats + 1):
        sizes = {
            _measured(study, Point(case, nodes, nodes * study.ranks_per_node, bits, repeat))
            for case in study.cases
            for nodes in study.nodes
            for bits in study.bits
        }
        points += sorted(sizes, key=_shuffled)
    return tuple(points)


def counts_for(case: Case, point: Point) -> bool:
    """Return whether a point belongs to a case, as its own or as a shared point.

    Points of one rank are shared by all algorithms, points of one node by all networks.
    """
    own = point.case
    if point.nodes == 1:
        own = replace(own, network=case.network)
    if point.ranks == 1:
        own = replace(own, algorithm=case.algorithm)
    return own == case


def script_args(study: Study, point: Point) -> tuple[str, ...]:
    """Return the script's arguments at a point: the user's first, then the study's.

    The convention for scripts (scaling/README.md): ``--global-batch-size B`` is the batch of all
    ranks together, ``--batch-size B`` the batch of each rank, unless ``batch_args`` replaces both;
    ``--epochs E`` is the number of passes over the data, ``--steps N`` ends after N steps.
    """
    program = study.program(point.case)
    total = global_batch(study.mode, point.case, point.ranks)
    batch = program.batch_words(study.mode, global_batch=total, ranks=point.ranks)
    return (*program.args, *batch, *program.limit_words())


def global_batch(mode: str, case: Case, ranks: int) -> int:
    """Return the number of samples of all ranks in a step."""
    return case.batch_size * (ranks if mode == "weak" else 1)


def environment(study: Study, point: Point, records: str) -> dict[str, str]:
    """Return the variables of a point's job; `records` is the file for its records.

    Code and algorithm are always set, so that the caller's values do not affect a point. The
    planner is off unless the caller sets it, because the report shows the effect of compression.
    """
    threads = {} if study.threads is None else {"OMP_NUM_THREADS": str(study.threads)}
    return {
        "QSGD_BITS": str(point.bits),
        "QSGD_SCHEME": "qsgd",
        "QSGD_ALGORITHM": point.case.algorithm,
        "QSGD_RECORDS": records,
        "QSGD_PLANNER": env.get("QSGD_PLANNER") if env.is_set("QSGD_PLANNER") else "off",
        **threads,
    }


def equal_threads(cores: int, study: Study) -> int:
    """Return the threads of a rank if all nodes of a study are one machine with these cores.

    A rank has the same number of threads at every size as at the largest. Otherwise a single rank
    would use all cores, and more ranks could only divide them: no study would show any speed-up.
    """
    return max(1, cores // (max(study.nodes) * study.ranks_per_node))


def _measured(study: Study, point: Point) -> Point:
    if point.nodes == 1 and study.networks:
        point = replace(point, case=replace(point.case, network=study.networks[0]))
    if point.ranks > 1:
        return point
    case = replace(point.case, algorithm=study.algorithms[0])
    return replace(point, case=case, bits=PLAIN_BITS)


def _shuffled(point: Point) -> str:
    # A hash, not `random`, gives the same order under every Python version.
    return hashlib.sha256(f"{_ORDER_SEED} {point.key}".encode()).hexdigest()
