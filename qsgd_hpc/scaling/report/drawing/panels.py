"""Selection of the charts that a case has data for."""

from __future__ import annotations

from functools import partial

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import BREAKDOWN, CaseAnalysis
from qsgd_hpc.scaling.analysis.verdicts import largest_rows
from qsgd_hpc.scaling.report.drawing import curves, speed, steps
from qsgd_hpc.scaling.report.drawing.panel import Panel

__all__ = ["accuracy_panels", "breakdown_panel", "panels", "speedup_panel", "throughput_panel"]


def panels(case: CaseAnalysis) -> list[Panel]:
    """Return the panels that the case has data for; the first is always the throughput."""
    found = [throughput_panel(case), *_largest(case)]
    if len(case.table["nodes"].unique()) > 1:
        found.append(
            Panel(
                "efficiency",
                "Efficiency",
                "Speed-up over the ratio of ranks; 100% is ideal.",
                3.2,
                lambda axes: speed.efficiency(axes[0], case),
            )
        )
    found += [p for p in (speedup_panel(case), breakdown_panel(case)) if p is not None]
    return [*found, *accuracy_panels(case)]


def throughput_panel(case: CaseAnalysis, *, log: bool | None = None) -> Panel:
    """Return throughput over nodes, on logarithmic or linear axes; None: chosen by the sizes."""
    lines = len(largest_rows(case))
    return Panel(
        "throughput",
        f"{units.capitalised(case.unit)} per second",
        "Dashed: ideal, the reference multiplied by the ranks. Bars: 95% intervals."
        if case.table["throughput_lo"].notna().any()
        else "Dashed: ideal, the reference multiplied by the ranks.",
        max(4.25, 0.8 * lines + 2.1),
        lambda axes: speed.throughput(axes[0], case, log=log),
    )


def speedup_panel(case: CaseAnalysis) -> Panel | None:
    """Return the speed-ups with the laws fitted to them; None without laws."""
    if not case.fits:
        return None
    return Panel(
        "speedup",
        "Speed-up and fitted laws",
        "Points: measured. Lines: of the laws that apply, each series’ one with the smallest "
        "residuals, drawn to twice the largest size. Dashed: ideal.",
        3.2,
        lambda axes: speed.speedup(axes[0], case),
    )


def breakdown_panel(case: CaseAnalysis) -> Panel | None:
    """Return the parts of a step; None if no row has all of them."""
    rows = [r for r in case.rows() if all(r[part] is not None for part in BREAKDOWN)]
    if not rows:
        return None
    return Panel(
        "breakdown",
        "Where a step’s time goes",
        "A bar is the mean step. The thin bar under it is the engine’s work at the same time.",
        steps.breakdown_height(rows),
        lambda axes: steps.breakdown(axes[0], rows),
        key=steps.breakdown_key(rows),
    )


def accuracy_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the curves of the quality, one panel for each number of nodes with curves."""
    return [
        Panel(
            f"accuracy_{nodes}",
            f"{units.quality_name(case.quality)} while training, {units.nodes_name(nodes)}",
            "",
            2.2,
            partial(curves.draw_curves, case=case, found=found),
            axes=len(curves.clocks(found)),
        )
        for nodes, found in curves.recorded(case).groupby("nodes")
    ]


def _largest(case: CaseAnalysis) -> list[Panel]:
    largest = largest_rows(case)
    where = units.nodes_name(int(str(largest[0]["nodes"])))
    height = 0.5 + 0.4 * len(largest)
    found = []
    if sending := [r for r in largest if r["wire_bytes_per_step"]]:
        found.append(
            Panel(
                "wire",
                f"Bytes on the wire per step, {where}",
                "What all ranks together send in one training step.",
                height,
                lambda axes: curves.wire(axes[0], sending),
            )
        )
    if case.quality and (judged := [r for r in largest if r[case.quality] is not None]):
        found.append(
            Panel(
                "quality",
                f"{units.quality_name(case.quality)}, {where}",
                "After the last epoch. The axis does not start at zero.",
                height + 0.2,
                lambda axes: curves.quality_dots(axes[0], case, judged),
            )
        )
    return found
