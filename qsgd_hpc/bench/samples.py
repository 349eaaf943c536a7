"""Samples, and the numbers derived from them: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

__all__ = ["Row", "Timing", "compare", "row_json"]


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
