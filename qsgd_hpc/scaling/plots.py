"""Turn the panels into inline SVG for the page, and into one sheet as PNG and SVG files."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsgd_hpc.scaling.analyse import Analysis
from qsgd_hpc.scaling.panels import GRID, INK, PAPER, QUIET, SERIES, Panel, panels

__all__ = ["Chart", "charts", "write_sheet"]

# In the page every colour becomes a CSS variable, so the one SVG follows light, dark and paper.
VARIABLES = {
    INK: "--ink",
    QUIET: "--quiet",
    GRID: "--grid",
    PAPER: "--paper",
    **{colour: f"--bits-{bits}" for bits, colour in SERIES.items()},
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
# Inches. In the page both stand at one scale, so that their letters are equally large.
WIDE, NARROW = 6.6, 4.3


@dataclass(frozen=True)
class Chart:
    """A panel for the page; `narrow` is the same drawing for a phone, None where `svg` fits."""

    name: str
    title: str
    caption: str
    svg: str
    narrow: str | None


def charts(analysis: Analysis) -> tuple[Chart, ...]:
    """Return the study's panels as inline SVG that follows the page's colours and font."""
    first, *others = panels(analysis)
    return (
        Chart(first.name, first.title, first.caption, _inline(first, WIDE), _inline(first, NARROW)),
        *(Chart(p.name, p.title, p.caption, _inline(p, NARROW), None) for p in others),
    )


def write_sheet(analysis: Analysis, title: str, subtitle: str, stem: Path) -> None:
    """Write all panels on one sheet as `stem`.png (200 dots per inch) and `stem`.svg."""
    first, *others = panels(analysis)
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "path", "svg.hashsalt": "sheet"}):
        figure = Figure(figsize=(12, 5.8))
        FigureCanvasAgg(figure)
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
            axes = figure.add_subplot(place)
            panel.draw(axes)
            axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", pad=12)
        figure.text(0.025, 0.935, title, fontsize=15, fontweight="bold", va="center")
        figure.text(0.025, 0.883, subtitle, color=QUIET, va="center")
        figure.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def _inline(panel: Panel, width: float) -> str:
    # The salt keeps identifiers apart where several drawings share a page.
    salt = f"{panel.name}-{width}"
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = Figure(figsize=(width, panel.height))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        panel.draw(axes)
        figure.tight_layout(pad=0.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style type.*?</style>", "", svg, flags=re.DOTALL)  # it would style the page
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # unreferenced, and not unique in a page
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)  # the page's own font
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{panel.title}" ', 1)
