"""Panels as files: a sheet with the main ones, and single ones (PDF, PNG) for papers and slides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.drawing.networks import network_panels
from qsgd_hpc.scaling.report.drawing.panel import Panel, live
from qsgd_hpc.scaling.report.drawing.panels import (
    accuracy_panels,
    breakdown_panel,
    panels,
    speedup_panel,
)
from qsgd_hpc.scaling.report.drawing.steps import draw_key
from qsgd_hpc.scaling.report.drawing.style import QUIET, colour, styled
from qsgd_hpc.scaling.report.networks import Family

__all__ = ["write_files", "write_networks", "write_sheet"]

DPI = 200
# Metadata to omit (time and program of writing), because the same records must give the same bytes.
_PNG = {"Software": None}
_SVG = {"Date": None, "Creator": None}
_PDF = {"CreationDate": None, "Creator": None, "Producer": None}
_SHEET = ("throughput", "wire", "quality")


def write_sheet(case: CaseAnalysis, title: str, subtitle: str, stem: Path) -> None:
    """Write throughput, bytes and quality on one sheet as `stem`.png and `stem`.svg."""
    first, *others = [p for p in panels(case) if p.name in _SHEET]
    with styled((12, 5.8), fonts="path", salt="sheet") as figure:
        grid = figure.add_gridspec(
            max(1, len(others)),
            2 if others else 1,
            width_ratios=[1.5, 1] if others else None,
            left=0.065,
            right=0.975 if others else 0.88,
            top=0.77,
            bottom=0.1,
            wspace=0.42,
            hspace=0.55,
        )
        places = [grid[:, 0], *(grid[i, 1] for i in range(len(others)))]
        for panel, place in zip([first, *others], places, strict=True):
            _draw_titled(panel, figure.add_subplot(place))
        figure.text(0.025, 0.935, title, fontsize=15, fontweight="bold", va="center")
        figure.text(0.025, 0.883, subtitle, color=QUIET, va="center")
        _save_sheet(figure, stem)


def write_networks(family: Family, stem: Path) -> None:
    """Write one case on its networks as `stem`.png and `stem`.svg."""
    made = network_panels(family)
    with styled((6.6 * len(made), 4.9), fonts="path", salt=stem.name) as figure:
        grid = figure.subplots(1, len(made), squeeze=False)
        for panel, axes in zip(made, grid.flat, strict=True):
            _draw_titled(panel, axes)
        handles = [Patch(color=colour(int(s.series)), label=s.name) for s in made[0].key]
        figure.legend(handles=handles, frameon=False, loc="upper right", ncols=len(handles))
        title = f"{family.label}: hosts and network emulated on one machine"
        figure.suptitle(title, x=0.02, ha="left", color=QUIET, fontsize=10.5)
        figure.tight_layout(pad=0.8, w_pad=2.5)
        _save_sheet(figure, stem)


def _draw_titled(panel: Panel, axes: Any) -> None:
    panel.draw([axes])
    axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", pad=12)


def _save_sheet(figure: Figure, stem: Path) -> None:
    figure.savefig(stem.with_suffix(".png"), dpi=DPI, metadata=_PNG)
    file = stem.with_suffix(".svg")
    figure.savefig(file, metadata=_SVG)
    file.write_text(live(file.read_text(encoding="utf-8")), encoding="utf-8")


def write_files(case: CaseAnalysis, folder: Path) -> list[str]:
    """Write accuracy_N (N nodes), speedup and breakdown as PDF and PNG; return their stems."""
    chosen = [*accuracy_panels(case), speedup_panel(case), breakdown_panel(case)]
    made = [panel for panel in chosen if panel is not None]
    for panel in made:
        _write(panel, case, folder / panel.name)
    return [panel.name for panel in made]


def _write(panel: Panel, case: CaseAnalysis, stem: Path) -> None:
    wide = 4.4 * panel.axes if panel.axes > 1 else 6.2
    size = (wide, panel.height + (0.95 if panel.key else 0.5))
    with styled(size, fonts="path", salt=panel.name) as figure:
        axes = list(figure.subplots(1, panel.axes, squeeze=False).flat)
        panel.draw(axes)
        if panel.key:
            draw_key(axes[0], panel.key)
        figure.suptitle(
            f"{panel.title}: {case.case.label}", fontsize=11, x=0.02, ha="left", wrap=True
        )
        figure.tight_layout(pad=0.6, w_pad=2.0)
        figure.savefig(stem.with_suffix(".pdf"), metadata=_PDF)
        figure.savefig(stem.with_suffix(".png"), dpi=DPI, metadata=_PNG)
