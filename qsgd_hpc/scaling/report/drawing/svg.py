"""Panels as inline SVG for the page: with its colours and font, and with tooltips."""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.drawing.panel import Panel, live
from qsgd_hpc.scaling.report.drawing.panels import panels, throughput_panel
from qsgd_hpc.scaling.report.drawing.style import VARIABLES, logarithmic, styled

__all__ = ["Chart", "Drawing", "chart", "charts", "inline"]

# Widths in inches that give all charts the same scale and font size in the page: the first chart
# next to two small ones, two others in a row, and every chart on a phone (SMALL).
FIRST, HALF, SMALL = 6.6, 5.3, 4.3
_BESIDE = ("throughput", "wire", "quality")


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
        return "first" if self.panel.name in _BESIDE else "more"


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
            svg = inline(drawn, width, f"{place}-{scale}-{size}")
            drawings.append(Drawing(f"{size} {scale}", svg))
    return Chart(panel, tuple(drawings), scales if len(scales) > 1 else ())


def chart(panel: Panel, place: str) -> Chart:
    """Return one panel for the page; `place` is the id of its section."""
    if panel.name in _BESIDE:
        return Chart(panel, (Drawing("any", inline(panel, SMALL, place)),))
    sizes = (("wide", HALF), ("narrow", SMALL))
    return Chart(
        panel, tuple(Drawing(s, inline(panel, width, f"{place}-{s}")) for s, width in sizes)
    )


def inline(panel: Panel, width: float, place: str) -> str:
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
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", f'<svg role="group" aria-label="{html.escape(title)}" ', 1)
