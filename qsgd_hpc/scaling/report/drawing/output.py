"""Panels as inline SVG for the page, with its colours, font and tooltips, and as files.

The files are a sheet with the main panels, and single ones (PDF, PNG) for papers and slides.
"""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.drawing.bars import (
    breakdown_panels,
    draw_key,
    network_panels,
    quality_panels,
    wire_panels,
)
from qsgd_hpc.scaling.report.drawing.lines import (
    curve_panels,
    efficiency_panels,
    speedup_panels,
    throughput_panel,
)
from qsgd_hpc.scaling.report.drawing.style import (
    QUIET,
    VARIABLES,
    Panel,
    colour,
    live,
    logarithmic,
    styled,
)
from qsgd_hpc.scaling.report.networks import Family

__all__ = ["Chart", "Drawing", "chart", "charts", "write_files", "write_networks", "write_sheet"]

# Widths in inches that give all charts the same scale and font size in the page: the first chart
# next to two small ones, two others in a row, and every chart on a phone (SMALL).
FIRST, HALF, SMALL = 6.6, 5.3, 4.3
MAIN = ("throughput", "wire", "quality")
DPI = 200
# Metadata to omit (time and program of writing), because the same records must give the same bytes.
_PNG = {"Software": None}
_SVG = {"Date": None, "Creator": None}
_PDF = {"CreationDate": None, "Creator": None, "Producer": None}


def panels(case: CaseAnalysis) -> list[Panel]:
    """Return the panels that the case has data for; the first is always the throughput."""
    return [
        throughput_panel(case),
        *wire_panels(case),
        *quality_panels(case),
        *efficiency_panels(case),
        *speedup_panels(case),
        *breakdown_panels(case),
        *curve_panels(case),
    ]


@dataclass(frozen=True)
class Drawing:
    """One SVG and its CSS classes, which select when to show it: any, wide, narrow; linear, log."""

    classes: str
    svg: str


@dataclass(frozen=True)
class Chart:
    """A panel for the page."""

    panel: Panel
    drawings: tuple[Drawing, ...]
    scales: tuple[str, ...] = ()
    """Kinds of axes between which the reader can switch, the initial one first."""

    @property
    def group(self) -> str:
        """The grid of the page that contains it: "first", or "more" below."""
        return "first" if self.panel.name in MAIN else "more"


def charts(case: CaseAnalysis, place: str) -> tuple[Chart, ...]:
    """Return the case's panels for the page; `place` is the id of the case there."""
    first, *others = panels(case)
    return (_first(case, first, place), *(chart(panel, place) for panel in others))


def _first(case: CaseAnalysis, panel: Panel, place: str) -> Chart:
    nodes = sorted(case.table["nodes"].unique())
    scales: tuple[str, ...] = ("log", "linear") if logarithmic(nodes) else ("linear", "log")
    if len(nodes) < 3:
        scales = scales[:1]  # between two points, both kinds of axes show the same line
    drawings = []
    for scale in scales:
        drawn = throughput_panel(case, log=scale == "log")
        for size, width in (("wide", FIRST), ("narrow", SMALL)):
            svg = _inline(drawn, width, f"{place}-{scale}-{size}")
            drawings.append(Drawing(f"{size} {scale}", svg))
    return Chart(panel, tuple(drawings), scales if len(scales) > 1 else ())


def chart(panel: Panel, place: str) -> Chart:
    """Return one panel for the page; `place` is the id of its section."""
    if panel.name in MAIN:
        return Chart(panel, (Drawing("any", _inline(panel, SMALL, place)),))
    sizes = (("wide", HALF), ("narrow", SMALL))
    return Chart(
        panel, tuple(Drawing(s, _inline(panel, width, f"{place}-{s}")) for s, width in sizes)
    )


def _inline(panel: Panel, width: float, place: str) -> str:
    """Return a panel as an SVG element that scales with its column; `place` must be unique."""
    size = (width, panel.height * panel.axes)
    with styled(size, fonts="none", salt=f"{place}-{panel.name}") as figure:
        axes = list(figure.subplots(panel.axes, 1, squeeze=False).flat)
        panel.draw(axes)
        figure.tight_layout(pad=0.2, h_pad=1.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _adopt(buffer.getvalue(), panel.title)


def _adopt(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style type.*?</style>", "", svg, flags=re.DOTALL)  # it would style the page
    svg = live(svg)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)  # the page's own font
    for shade, variable in VARIABLES.items():
        svg = svg.replace(shade, f"var({variable})")
    return svg.replace("<svg ", f'<svg role="group" aria-label="{html.escape(title)}" ', 1)


def write_sheet(case: CaseAnalysis, title: str, subtitle: str, stem: Path) -> None:
    """Write throughput, bytes and quality on one sheet as `stem`.png and `stem`.svg."""
    first, *others = [p for p in panels(case) if p.name in MAIN]
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
        heading = figure.text(0.025, 0.935, title, fontsize=15, fontweight="bold", va="center")
        share = heading.get_window_extent().width / figure.bbox.width
        heading.set_fontsize(15 * min(1.0, 0.93 / share))
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
    made = [*curve_panels(case), *speedup_panels(case), *breakdown_panels(case)]
    for panel in made:
        _write(panel, case, folder / panel.name)
    return [panel.name for panel in made]


def _write(panel: Panel, case: CaseAnalysis, stem: Path) -> None:
    wide = 4.4 * panel.axes if panel.axes > 1 else 6.2
    above = 0.45 if panel.key else 0.0
    size = (wide, panel.height + 0.5 + above)
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
