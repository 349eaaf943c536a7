"""A chart, independent of its format (SVG, PNG, PDF), and its marks for the interactive page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Panel", "Swatch", "live", "mark"]

_GROUP = re.compile(r"""<g id=(?P<id>"[^"]*"|'[^']*')(?P<rest>[^>]*)>""")


@dataclass(frozen=True)
class Swatch:
    """An entry of a chart's key: the series, its name, and its CSS variable."""

    series: str
    name: str
    variable: str


@dataclass(frozen=True)
class Panel:
    """The content of a chart.

    Attributes:
        name: name of the chart, unique in its case; part of its id in the page.
        title: heading.
        caption: one or two sentences under it.
        height: height of one of its axes in inches.
        draw: draws the chart on a sequence of `axes` axes.
        axes: number of axes; side by side if there is room, else one above the other.
        key: meaning of the colours, if the chart has no labels for it.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Sequence[Any]], None]
    axes: int = 1
    key: tuple[Swatch, ...] = ()


def mark(artist: Any, series: int | str, *tip: str) -> None:
    """Attach a series and the lines of a tooltip to an artist.

    matplotlib writes an artist's gid as the id of its SVG group; :func:`live` converts it to
    attributes for the page.
    """
    artist.set_gid(json.dumps([str(series), *(line for line in tip if line)]))


def live(svg: str) -> str:
    """Convert the ids written by :func:`mark` to data-series and a title; remove all other ids."""

    def group(match: re.Match[str]) -> str:
        try:
            series, *tip = json.loads(html.unescape(match["id"][1:-1]))
        except ValueError:
            return f"<g{match['rest']}>"  # an id of matplotlib: unused, and not unique in a page
        named = f'<g data-series="{html.escape(series)}"'
        if not tip:
            return f"{named}{match['rest']}>"
        text = html.escape("\n".join(tip))
        return f'{named} class="mark"{match["rest"]}><title>{text}</title>'

    return _GROUP.sub(group, svg)
