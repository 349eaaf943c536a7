"""The charts of a report: panels drawn by matplotlib, as inline SVG for the page and as files.

Not plotly: its script alone is five megabytes in every page, its figures keep their own colours in
the dark and print badly. matplotlib's SVG is small, follows the page's colours, and looks the same
on paper and without JavaScript; templates/report.js.j2 adds what a hand can do to it.
"""

from qsgd_hpc.scaling.report.drawing.panel import Panel, Swatch
from qsgd_hpc.scaling.report.drawing.panels import panels

__all__ = ["Panel", "Swatch", "panels"]
