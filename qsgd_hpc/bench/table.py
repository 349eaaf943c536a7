"""Samples, and the rows and lines of ``bench allreduce`` that are made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from qsgd_hpc import __version__
from qsgd_hpc.bench.words import rate_text, size_text, time_text

__all__ = ["LEGEND", "Row", "Timing", "compare", "header", "line", "row_json", "write_json"]


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation; each sample is the slowest rank's."""

    min_s: float
    median_s: float
    p99_s: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise; with fewer than 100 samples, p99 is the largest."""
        ordered = np.sort(np.asarray(seconds))
        p99 = np.quantile(ordered, 0.99, method="higher")
        return cls(float(ordered[0]), float(np.median(ordered)), float(p99), len(ordered))


@dataclass(frozen=True)
class Row:
    """One line of the table: an allreduce of one size by one contestant."""

    size_bytes: int
    what: str
    """Such as "fp32", "4 bit", "MPI_Allreduce" or "gloo fp16"."""
    algorithm: str
    """Algorithm of this package's allreduce; empty for peers."""
    timing: Timing
    ranks: int
    is_peer: bool = False
    is_exact: bool = True
    """Whether float32 is sent, so that it can be compared with float32 peers."""
    wire_bytes: int | None = None
    """Largest number of bytes that a rank sent in one allreduce; None for peers."""
    limit_s: float | None = None
    """These bytes over the measured bandwidth; None without a network."""
    nmse: float | None = None
    """Squared error of the sum over the squared magnitude of the exact sum."""
    speedup: float | None = None
    """Median of the fastest float32 peer at this size over ours."""

    @property
    def algbw_gb_per_s(self) -> float:
        """Bytes of float32 reduced per second, in 1e9."""
        return self.size_bytes / self.timing.median_s / 1e9

    @property
    def busbw_gb_per_s(self) -> float:
        """The bandwidth that a ring in float32 would need for this speed: 2 (p-1)/p algbw."""
        return self.algbw_gb_per_s * 2 * (self.ranks - 1) / self.ranks

    @property
    def over_limit(self) -> float | None:
        """Median over the limit; 1 is perfect."""
        return self.timing.median_s / self.limit_s if self.limit_s else None


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one size with the speed-up of ours over the best float32 peer."""
    peers = [row.timing.median_s for row in rows if row.is_peer and row.is_exact]
    if not peers:
        return list(rows)
    best_s = min(peers)
    return [
        row if row.is_peer else replace(row, speedup=best_s / row.timing.median_s) for row in rows
    ]


def row_json(row: Row) -> dict[str, Any]:
    """Return a row in its JSON form: its fields and derived values."""
    found = asdict(row)
    found.update(found.pop("timing"))
    found["algbw_gb_per_s"] = row.algbw_gb_per_s
    found["busbw_gb_per_s"] = row.busbw_gb_per_s
    found["over_limit"] = row.over_limit
    return found


SCHEMA = 1
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


def write_json(path: Path, record: dict[str, Any]) -> str:
    """Write the results of a benchmark with their date; return what to print."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    whole = {"schema": SCHEMA, "version": __version__, "date": date, **record}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return f"written: {path}"
