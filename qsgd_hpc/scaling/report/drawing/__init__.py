"""The charts of a report: panels drawn by matplotlib, as inline SVG for the page and as files.

Not plotly: its script adds five megabytes to every page, and its figures keep their colours in dark
mode and print badly. matplotlib's SVG is small, follows the page's colours, and looks the same on
paper and without JavaScript; templates/report.js.j2 adds the interaction.
"""
