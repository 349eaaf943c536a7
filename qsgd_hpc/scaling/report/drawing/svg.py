"""Panels as inline SVG for the page: its colours and font, and marks that answer a pointer."""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.drawing.panel import Panel, live
from qsgd_hpc.scaling.report.drawing.panels import panels, throughput_panel
from qsgd_hpc.scaling.report.drawing.style import STYLE, VARIABLES, logarithmic

__all__ = ["Chart", "Drawing", "chart", "charts", "inline"]

# Inches. At these widths all stand at one scale in the page, so that their letters are equally
# large: the first chart beside two small ones, the others two in a row, and all on a phone.
FIRST, HALF, SMALL = 6.6, 5.3, 4.3
_BESIDE = ("throughput", "wire", "quality")


@dataclass(frozen=True)
class Drawing:
    """One SVG and the classes that say when it is shown: any, wide, narrow; linear, log."""

    classes: str
    svg: str


@dataclass(frozen=True)
class Chart:
    """A panel for the page."""

    panel: Panel
    drawings: tuple[Drawing, ...]
    scales: tuple[str, ...] = ()
    """Kinds of axes between which the reader may switch, the one shown first in front."""

    @property
    def group(self) -> str:
        """The grid of the page that it stands in: "first", or "more" below."""
        return "first" if self.panel.name in _BESIDE else "more"


def charts(case: CaseAnalysis, place: str) -> tuple[Chart, ...]:
    """Return the case's panels for the page; `place` is the id of the case there."""
    first, *others = panels(case)
    return (_first(case, first, place), *(chart(panel, place) for panel in others))


def _first(case: CaseAnalysis, panel: Panel, place: str) -> Chart:
    nodes = sorted(case.table["nodes"].unique())
    scales: tuple[str, ...] = ("log", "linear") if logarithmic(nodes) else ("linear", "log")
    if len(nodes) < 3:
        scales = scales[:1]  # between two points both axes show the same line
    drawings = []
    for scale in scales:
        drawn = throughput_panel(case, log=scale == "log")
        for size, width in (("wide", FIRST), ("narrow", SMALL)):
            svg = inline(drawn, width, f"{place}-{scale}-{size}")
            drawings.append(Drawing(f"{size} {scale}", svg))
    return Chart(panel, tuple(drawings), scales if len(scales) > 1 else ())


def chart(panel: Panel, place: str) -> Chart:
    """Return one panel for the page; `place` is unique to what it belongs to."""
    if panel.name in _BESIDE:
        return Chart(panel, (Drawing("any", inline(panel, SMALL, place)),))
    sizes = (("wide", HALF), ("narrow", SMALL))
    return Chart(
        panel, tuple(Drawing(s, inline(panel, width, f"{place}-{s}")) for s, width in sizes)
    )


def inline(panel: Panel, width: float, place: str) -> str:
    """Return a panel as an SVG element that scales with its column; `place` is unique to it."""
    # The salt keeps identifiers apart where several drawings share a page.
    salt = f"{place}-{panel.name}"
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = Figure(figsize=(width, panel.height * panel.axes))
        FigureCanvasAgg(figure)
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
