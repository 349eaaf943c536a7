"""A chart before it becomes SVG, PNG or PDF; and the marks that the page makes interactive."""

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
    """An entry of a chart's key: the series it stands for, its name, and its CSS variable."""

    series: str
    name: str
    variable: str


@dataclass(frozen=True)
class Panel:
    """The content of a chart.

    Attributes:
        name: of the chart in its case; part of its id in the page.
        title: its heading.
        caption: one or two sentences under it.
        height: inches of one of its axes.
        draw: draws on as many axes as `axes` says.
        axes: how many; side by side where there is room, else one above the other.
        key: what the colours mean, where labels in the chart do not say it.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Sequence[Any]], None]
    axes: int = 1
    key: tuple[Swatch, ...] = ()


def mark(artist: Any, series: int | str, *tip: str) -> None:
    """Say which series an artist belongs to and, line by line, the values behind it.

    matplotlib writes an artist's gid as the id of its SVG group; :func:`live` turns it into
    attributes for the page.
    """
    artist.set_gid(json.dumps([str(series), *(line for line in tip if line)]))


def live(svg: str) -> str:
    """Turn the ids that :func:`mark` left into data-series and a title; drop all other ids."""

    def group(match: re.Match[str]) -> str:
        try:
            series, *tip = json.loads(html.unescape(match["id"][1:-1]))
        except ValueError:
            return f"<g{match['rest']}>"  # matplotlib's own: unreferenced, not unique in a page
        named = f'<g data-series="{html.escape(series)}"'
        if not tip:
            return f"{named}{match['rest']}>"
        text = html.escape("\n".join(tip))
        return f'{named} class="mark"{match["rest"]}><title>{text}</title>'

    return _GROUP.sub(group, svg)
