"""The table of ``bench allreduce``, printed line by line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from qsgd_hpc.bench.samples import Row
from qsgd_hpc.bench.words import rate_text, size_text, time_text

__all__ = ["LEGEND", "header", "line"]

COLUMNS = (
    ("size", 8),
    ("what", 19),
    ("algorithm", 18),
    ("min", 9),
    ("median", 9),
    ("p99", 9),
    ("algbw", 7),
    ("busbw", 7),
    ("wire", 8),
    ("limit", 6),
    ("NMSE", 8),
    ("peer", 7),
)
LEFT = frozenset({"what", "algorithm"})
LEGEND = (
    "algbw: GB/s of float32 reduced; busbw: algbw * 2(p-1)/p, comparable with the link",
    "wire: bytes that a rank sends; limit: median over (wire / bandwidth), 1 is perfect",
    "NMSE: squared error of the sum / its squared magnitude; "
    "peer: times faster than the best fp32 peer",
)


def _cells(values: Sequence[str]) -> str:
    cells = [
        value.ljust(width) if name in LEFT else value.rjust(width)
        for (name, width), value in zip(COLUMNS, values, strict=True)
    ]
    return "  ".join(cells).rstrip()


def header() -> Text:
    """Return the names of the columns."""
    return Text(_cells([name for name, _ in COLUMNS]), style="bold")


def line(row: Row, *, first: bool) -> Text:
    """Return a row; the size is printed on the first of its size."""

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    text = _cells(
        [
            size_text(row.size_bytes) if first else "",
            row.what,
            row.algorithm or "-",
            time_text(row.timing.min_s),
            time_text(row.timing.median_s),
            time_text(row.timing.p99_s),
            rate_text(row.algbw_gb_per_s),
            rate_text(row.busbw_gb_per_s),
            "-" if row.wire_bytes is None else size_text(row.wire_bytes),
            optional(row.over_limit, ".2f"),
            optional(row.nmse, ".1e"),
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
        ]
    )
    return Text(text, style="dim" if row.is_peer else "")
