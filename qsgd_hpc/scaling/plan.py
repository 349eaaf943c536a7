"""From a study to its points and each point's command: pure functions, nothing is started here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.study import Study

__all__ = ["Point", "environment", "equal_threads", "plan", "script_args"]

_ORDER_SEED = "qsgd-hpc scaling order 1"
PLAIN_BITS = 32


@dataclass(frozen=True)
class Point:
    """One measurement: so many nodes and ranks, these bits, and which repeat it is (from 1)."""

    nodes: int
    ranks: int
    bits: int
    repeat: int

    @property
    def key(self) -> str:
        """Name of the point's folder; unique in a study."""
        return f"nodes{self.nodes}-bits{self.bits}-repeat{self.repeat}"

    @property
    def label(self) -> str:
        """Words for progress lines, such as '2 nodes, 4 bit'."""
        return f"{words.nodes_name(self.nodes)}, {words.bits_name(self.bits)}"


def plan(study: Study) -> tuple[Point, ...]:
    """Return the points of a study in the order in which they are measured.

    Nodes are crossed with bits and repeats. One rank sends nothing, so a point of one rank is
    measured once per repeat and labelled 32 bit, whatever bits the study compares. Each repeat is
    a complete round in a shuffled order of its own: a machine that grows slower (heat, other
    users) then touches all sizes alike and cannot pass for scaling. The order depends on nothing
    but the points, so a resumed study continues the same one.
    """
    points: list[Point] = []
    for repeat in range(1, study.repeats + 1):
        sizes = {
            Point(nodes, ranks, PLAIN_BITS if ranks == 1 else bits, repeat)
            for nodes in study.nodes
            for ranks in [nodes * study.ranks_per_node]
            for bits in study.bits
        }
        points += sorted(sizes, key=_shuffled)
    return tuple(points)


def script_args(study: Study, point: Point) -> tuple[str, ...]:
    """Return the script's arguments at a point: the user's own first, then what the study sets.

    The convention that a script follows (scaling/README.md): ``--global-batch-size B`` is shared
    by all ranks, ``--batch-size B`` belongs to each rank, ``--epochs E`` are passes over the data.
    """
    option = "--global-batch-size" if study.mode == "strong" else "--batch-size"
    epochs = () if study.epochs is None else ("--epochs", str(study.epochs))
    return (*study.script_args, option, str(study.batch_size), *epochs)


def environment(study: Study, point: Point, records: str) -> dict[str, str]:
    """Return the variables of a point's job; `records` is the file its records go to."""
    threads = {} if study.threads is None else {"OMP_NUM_THREADS": str(study.threads)}
    return {"QSGD_BITS": str(point.bits), "QSGD_RECORDS": records, **threads}


def equal_threads(cores: int, study: Study) -> int:
    """Return the threads of a rank when all nodes of a study are one machine with these cores.

    Every size gives a rank the share of the largest one. Otherwise a single rank would take all
    cores, and more ranks could only divide them: no study would show any speed-up.
    """
    return max(1, cores // (max(study.nodes) * study.ranks_per_node))


def _shuffled(point: Point) -> str:
    # A hash, not `random`: the same order under every Python version.
    return hashlib.sha256(f"{_ORDER_SEED} {point.key}".encode()).hexdigest()
