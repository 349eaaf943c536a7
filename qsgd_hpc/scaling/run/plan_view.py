"""What a study prints before it runs: its points in their order, its jobs and their cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.define.plan import PLAIN_BITS, Point, plan, script_args
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.run.cost import Estimate

__all__ = ["print_plan"]


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
    remarks.append(
        "The order is shuffled by a fixed seed, so that drift of the machine does not look like "
        "scaling."
    )
    if any(p.ranks == 1 for p in points) and study.bits != (PLAIN_BITS,):
        remarks.append("One rank sends nothing, so it is measured once per repeat, as fp32.")
    return remarks
