"""Contention between messages on a topology, simulated by SimGrid.

The simulator is a C++ program that uses SimGrid's S4U interface. It is compiled once, into
``$QSGD_HOME/simulators``. Its input is the traffic between network cards, its output the time of
each round; that time divided by the time of the closed form is the slowdown of a pattern. Bandwidth
is divided as fluids, so the slowdown does not depend on the size of messages, and one simulation
per pattern is sufficient.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.profile import Dragonfly, FatTree
from qsgd_hpc.scaling.predict.fabric import Fabric, card_loads, card_messages
from qsgd_hpc.scaling.predict.schedules import Layout, Messages, Phase, Schedule

__all__ = ["ROUTINGS", "SimGrid", "platform_line", "simulator"]

MOST_MESSAGES = 8192
"""Most messages in flight in a simulation; larger exchanges are sampled by rounds."""
LEAST_ROUNDS = 12
ADAPTIVE = "adaptive"
ROUTINGS = (ADAPTIVE, "minimal")
GOLDEN = 0.618
REFERENCE_BYTES = 1e6
REMEDY = "install g++ and libsimgrid-dev (tests/simgrid/install.sh does so on Debian and Ubuntu)"


@cache
def simulator() -> Path:
    """Return the path of the simulator; compile it unless this version is compiled already.

    Raises:
        UsageError: there is no compiler or no SimGrid; the message names what to install.
    """
    source = resources.files("qsgd_hpc.scaling.predict").joinpath("simulator.cc").read_text("utf-8")
    folder = env.home() / "simulators"
    program = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    if program.exists():
        return program
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UsageError(f"SimGrid: no C++ compiler was found; {REMEDY}.")
    folder.mkdir(parents=True, exist_ok=True)
    part = program.with_suffix(f".{os.getpid()}")
    found = subprocess.run(
        [compiler, "-O1", "-std=c++17", "-x", "c++", "-", "-o", str(part), "-lsimgrid"],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        fault = next((line for line in found.stderr.splitlines() if "error" in line), "")
        raise UsageError(f"SimGrid: the simulator does not compile ({fault.strip()}); {REMEDY}.")
    part.replace(program)
    return program


def platform_line(fabric: Fabric, cards: int, routing: str = ADAPTIVE) -> str:
    """Return the simulator's platform line for a job with `cards` network cards.

    A job uses the fewest groups or leaves possible, with the cards of a node adjacent. SimGrid
    routes messages of a dragonfly along the shortest path only. With `routing` "adaptive", a link
    between two routers (or groups) therefore represents all links of the router (or group) that may
    lead there, halved because a detour uses two of them; with "minimal" it represents itself. If a
    profile does not give the global links of a group, half as many as cards are assumed.
    """
    bandwidth = f"{fabric.card_bandwidth:.17g}"
    shape = fabric.shape
    if isinstance(shape, Dragonfly):
        groups = _groups(shape, cards)
        leaving = shape.global_links or shape.routers * shape.endpoints // 2
        if routing == ADAPTIVE:
            whole = shape.groups is not None and groups >= shape.groups
            between = leaving // max(1, groups - 1) // (1 if whole else 2)
            local = max(shape.local_links, (shape.routers - 1) * shape.local_links // 2)
        else:
            between = leaving // max(1, (shape.groups or groups) - 1)
            local = shape.local_links
        return (
            f"dragonfly {groups} {max(1, between)} {shape.routers} {local} {shape.endpoints} "
            f"{bandwidth}"
        )
    if isinstance(shape, FatTree):
        leaves = -(-cards // shape.leaf_hosts)
        if leaves > 1:
            return f"fat_tree {leaves} {shape.leaf_hosts} {shape.leaf_uplinks} 1 {bandwidth}"
    return f"crossbar {cards} {bandwidth}"


def _groups(shape: Dragonfly, cards: int) -> int:
    groups = -(-cards // (shape.routers * shape.endpoints))
    if groups > shape.routers:
        raise UsageError(
            f"a job of {cards} network cards needs {groups} groups, but SimGrid's dragonfly has at "
            f"most as many groups as a group has routers, {shape.routers}. Use fewer nodes, or "
            "--no-simgrid."
        )
    return groups


def sampled(phase: Phase, layout: Layout, cards: int, most: int = MOST_MESSAGES) -> list[Messages]:
    """Return a sample of a phase's rounds that represents all of them.

    A direct exchange is divided into other rounds than in the schedule: in round b, rank i sends to
    c i + b, so that the ranks of a switch send to different switches in every round, as they do
    over the complete exchange. The sample is evenly spaced.
    """
    if not phase.together:
        return [
            phase.at(0 if phase.alike else i) for i in range(1 if phase.alike else phase.rounds)
        ]
    one = card_messages([phase.at(0)], layout, cards)
    count = min(phase.rounds, max(LEAST_ROUNDS, most // max(1, len(one.bytes))))
    if count == phase.rounds or phase.pattern != "exchange":
        places = {(2 * k + 1) * phase.rounds // (2 * count) for k in range(count)}
        return [phase.at(i) for i in sorted(places)]
    return [
        _affine_round(layout, phase, (2 * k + 1) * phase.members // (2 * count))
        for k in range(count)
    ]


def _affine_round(layout: Layout, phase: Phase, offset: int) -> Messages:
    # Members are the ranks, or the nodes if each local rank has a separate exchange.
    members, side = phase.members, layout.ranks // phase.members
    factor = int(members * GOLDEN) | 1
    while math.gcd(factor, members) != 1:
        factor += 1
    sources = np.arange(members)
    targets = (factor * sources + offset) % members
    away = sources != targets
    spread = np.arange(side)
    ends = [(x[away][:, None] * side + spread).ravel() for x in (sources, targets)]
    return Messages(ends[0], ends[1], np.full(len(ends[0]), REFERENCE_BYTES))


class SimGrid:
    """Slowdowns on a fabric's topology; each is simulated once.

    Args:
        fabric: the machine.
        most: most messages in flight in a simulation.
        routing: "adaptive" or "minimal", see platform_line().
    """

    name = "SimGrid"

    def __init__(self, fabric: Fabric, most: int = MOST_MESSAGES, routing: str = ADAPTIVE) -> None:
        self.fabric = fabric
        self.routing = routing
        self.most = most
        self._known: dict[tuple[str, str, Layout], float] = {}

    def slowdown(self, schedule: Schedule, phase: Phase) -> float:
        """Return the phase's time between nodes over that of the closed form.

        Raises:
            UsageError: the simulator is not available, or failed.
        """
        layout = schedule.layout
        key = (schedule.algorithm, phase.pattern, layout)
        if key not in self._known:
            self._known[key] = self._simulate(phase, layout)
        return self._known[key]

    def _simulate(self, phase: Phase, layout: Layout) -> float:
        cards = self.fabric.cards
        rounds = sampled(phase, layout, cards, self.most)
        batches = [rounds] if phase.together else [[one] for one in rounds]
        alone = sum(card_loads(batch, layout, cards)[0] for batch in batches)
        if alone == 0:
            return 1.0
        found = [card_messages(batch, layout, cards) for batch in batches]
        times = self._run(found, layout.nodes * cards)
        return sum(times) * self.fabric.card_bandwidth / alone

    def _run(self, rounds: list[Messages], cards: int) -> list[float]:
        lines = [platform_line(self.fabric, cards, self.routing)]
        for m in rounds:
            lines.append(str(len(m.bytes)))
            ends = zip(m.sources, m.targets, m.bytes, strict=True)
            lines += [f"{a} {b} {size:.0f}" for a, b, size in ends]
        ended = subprocess.run(
            [str(simulator()), "--log=root.thresh:error"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise UsageError(
                f"SimGrid: the simulation of '{lines[0]}' failed: {ended.stderr.strip()[-300:]}"
            )
        return [float(line) for line in ended.stdout.split()]
