"""Cost of a study in node-hours, its cap, and the plan that is printed before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.define.study import PLAIN_BITS, Point, Study, plan, script_args
from qsgd_hpc.scaling.store import Attempt

__all__ = ["Estimate", "estimate", "expected_s", "measured_s", "print_plan", "refuse", "spent"]


def print_plan(console: Console, study: Study, done: Sequence[str], coming: Estimate) -> None:
    """Print the points in their order of measurement; `done` holds the keys of finished ones."""
    points = plan(study)
    several = len(study.cases) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = ("", *(("case",) if several else ()), "nodes", "ranks", "bits", "repeat", "state")
    for name in names:
        table.add_column(name, justify="left" if name in ("case", "state") else "right")
    for number, point in enumerate(points, start=1):
        finished = point.key in done
        table.add_row(
            str(number),
            *((point.case.label,) if several else ()),
            str(point.nodes),
            str(point.ranks),
            units.bits_name(point.bits),
            str(point.repeat),
            Text("finished" if finished else "to measure", style="green" if finished else ""),
        )
    console.print(Text(f"{study.title}, {study.mode} scaling on site {study.site}"))
    console.print(table, soft_wrap=not console.is_terminal)
    if len(done) < len(points):
        console.print(Text(_jobs(study, points, done, coming)), soft_wrap=True)
    for line in _remarks(study, points):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _jobs(study: Study, points: Sequence[Point], done: Sequence[str], coming: Estimate) -> str:
    left = [p for p in points if p.key not in done]
    how = ""
    if study.pack:
        held = units.nodes_name(max(p.nodes for p in left))
        how = f" Packed: the points run one after another inside a job of {held}."
    cap = study.max_node_hours
    limit = "" if cap is None else f" The limit is {units.hours(cap)}."
    return f"Left: {units.count(len(left), 'point')} in {coming.sentence}{how}{limit}"


def _remarks(study: Study, points: Sequence[Point]) -> list[str]:
    remarks = []
    for program in study.programs:
        first = next(p for p in points if program.trains(p.case))
        what = "Each point" if len(study.programs) == 1 else f"Each point of {program.name}"
        remarks.append(f"{what} runs: {program.script.name} {' '.join(script_args(study, first))}")
        if option := program.unknown_batch_option(study.mode):
            remarks.append(
                f"{program.script.name} does not mention {option}. If it ignores the option, "
                "samples/s are wrong. Give its own option by --batch-args '--bs {rank_batch}'; "
                "if it has none, use --batch-args '' and state its batch by --batch-size."
            )
    remarks.append(
        "The order is shuffled by a fixed seed, so that drift of the machine does not look like "
        "scaling."
    )
    if any(p.ranks == 1 for p in points) and study.bits != (PLAIN_BITS,):
        remarks.append("One rank sends no gradients, so it is measured once per repeat, as fp32.")
    return remarks


Times = Mapping[Point, float]


@dataclass(frozen=True)
class Estimate:
    """Node-hours of the remaining jobs.

    Attributes:
        node_hours: their sum; None if neither a walltime nor a measured time is known.
        jobs: number of jobs; with --pack, the least possible.
        bound: whether it is an upper bound (from walltimes), not an expectation (measured times);
            with --pack, of one job.
        packed: whether a job measures the points that its walltime allows, and another the rest.
    """

    node_hours: float | None
    jobs: int
    bound: bool
    packed: bool = False

    @property
    def sentence(self) -> str:
        """The estimate as text, for the plan."""
        count = units.count(self.jobs, "job")
        if self.node_hours is None:
            return f"{count}; node-hours are not known before the first point (no walltime)."
        if self.bound and self.packed:
            return (
                f"a job of at most {units.hours(self.node_hours)}; if it ends before the last "
                "point is measured, others follow it."
            )
        if self.bound:
            return f"{count}; at most {units.hours(self.node_hours)}, if each used its walltime."
        return f"{count}; about {units.hours(self.node_hours)}, by the times measured so far."


def measured_s(attempts: Iterable[Attempt]) -> dict[Point, float]:
    """Return the longest time that each finished point took, in seconds of its job."""
    times: dict[Point, float] = {}
    for attempt in attempts:
        seconds = attempt.seconds
        if attempt.fault is None and seconds is not None:
            times[attempt.point] = max(seconds, times.get(attempt.point, 0.0))
    return times


def spent(attempts: Iterable[Attempt]) -> float:
    """Return the node-hours of all attempts whose time is known, failed ones included."""
    return sum((a.seconds or 0.0) * a.held_nodes for a in attempts) / 3600


def expected_s(point: Point, times: Times, mode: str) -> float | None:
    """Return the expected seconds of a point, from other points of its program; None: unknown.

    Uses points of the same size and bits, else of the same size, else all of them; of several, the
    longest time. In strong scaling, times of other sizes are multiplied by the ratio of ranks if
    the point has fewer.
    """
    own = {
        p: s
        for p, s in times.items()
        if (p.case.workload, p.case.framework) == (point.case.workload, point.case.framework)
    }
    unlike, strong = replace(point, repeat=0), mode == "strong"
    for alike in (
        [s for p, s in own.items() if replace(p, repeat=0) == unlike],
        [s for p, s in own.items() if (p.case, p.nodes) == (point.case, point.nodes)],
        [s * (max(1.0, p.ranks / point.ranks) if strong else 1.0) for p, s in own.items()],
    ):
        if alike:
            return max(alike)
    return None


def estimate(
    study: Study, points: Sequence[Point], times: Times, walltime_min: float | None
) -> Estimate:
    """Estimate the jobs of these points; `walltime_min` is the limit of one job."""
    limit_s = None if walltime_min is None else walltime_min * 60
    seconds = [expected_s(p, times, study.mode) for p in points]
    known = [s for s in seconds if s is not None]
    bound = len(known) < len(points)
    if study.pack:
        total_s: float | None = limit_s if bound else sum(known)
        jobs = 1 if limit_s is None or total_s is None else max(1, -int(-total_s // limit_s))
        nodes = max((p.nodes for p in points), default=0)  # of the one job
        hours = None if total_s is None else nodes * total_s / 3600
        return Estimate(hours if points else 0.0, jobs if points else 0, bound, packed=True)
    each = [limit_s if s is None else min(s, limit_s or s) for s in seconds]
    if any(s is None for s in each):
        return Estimate(None, len(points), bound)
    total = sum(p.nodes * s for p, s in zip(points, each, strict=True) if s is not None)
    return Estimate(total / 3600, len(points), bound)


def refuse(
    study: Study, left: Sequence[Point], times: Times, used: float, walltime_min: float | None
) -> None:
    """Raise a UsageError, with smaller studies that fit, if the remaining points exceed the cap."""
    cap = study.max_node_hours
    if cap is None or not left:
        return
    coming = estimate(study, left, times, walltime_min)
    if coming.node_hours is None:
        raise UsageError(
            "--max-node-hours needs a limit for each job: give --walltime, such as --walltime 30m."
        )
    if used + coming.node_hours <= cap * (1 + 1e-9):
        return
    word = "may take up to" if coming.bound else "should take"
    before = f" after {units.hours(used)} already spent" if used else ""
    raise UsageError(
        f"--max-node-hours {cap:g}: the {len(left)} points that are left {word} "
        f"{units.hours(coming.node_hours)}{before}. What fits: "
        f"{_what_fits(study, cap - used, left, times, walltime_min)}."
    )


def _what_fits(
    study: Study, room: float, left: Sequence[Point], times: Times, walltime_min: float | None
) -> str:
    """Return the smallest changes of the study that fit into `room` node-hours, as text."""

    def fits(changed: Study) -> bool:
        kept = set(plan(changed))
        coming = estimate(changed, [p for p in left if p in kept], times, walltime_min)
        return coming.node_hours is not None and coming.node_hours <= room

    ways = []
    if walltime_min is not None:
        whole = estimate(study, left, {}, walltime_min).node_hours or 0.0
        shorter = int(walltime_min * room / whole) if whole else 0
        if shorter >= 1:
            ways.append(f"--walltime {shorter}m")
    fewer = [r for r in range(study.repeats - 1, 0, -1) if fits(replace(study, repeats=r))]
    ways += [f"--repeats {fewer[0]}"] if fewer else []
    sizes = [study.nodes[:n] for n in range(len(study.nodes) - 1, 0, -1)]
    small = [nodes for nodes in sizes if fits(replace(study, nodes=nodes))]
    ways += [f"--nodes {','.join(map(str, small[0]))}"] if small else []
    if not study.pack and fits(replace(study, pack=True)):
        ways.append("--pack")
    return ", or ".join(ways) or "no smaller study is possible; allow more node-hours"
