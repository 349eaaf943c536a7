"""Fit Hockney's model of a link to the communication that a case measured.

T = latency * messages + bytes / bandwidth (Hockney, The communication challenge for MPP, Parallel
Computing 20, 1994), per rank and step. T is the time in collectives less that of coding, so it
holds what waiting for slower ranks costs too. A reduction by p ranks in two phases, each rank
exchanging with all others or around a ring, takes 2 (p - 1) messages; bytes are counted. Bits vary
the bytes at equal messages, and ranks vary the messages: both together tell the two apart.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from qsgd_hpc.scaling.analysis.least_squares import Array, nonnegative, profile_interval
from qsgd_hpc.scaling.analysis.results import Estimate, LinkFit

__all__ = ["fit_link"]

# Columns more parallel than this (cosine) inflate the variance of both costs more than tenfold.
_PARALLEL = 0.95


def fit_link(runs: pd.DataFrame) -> LinkFit | None:
    """Fit latency and bandwidth to the runs of a case; None with fewer than two rows that tell.

    Relative residuals are minimised, both costs from 0; profile.py finds the intervals.
    """
    sending = _sending(runs)
    points = len(sending.groupby(["ranks", "bits"]))
    if points < 2:
        return None
    seconds = sending["link_s"].to_numpy()
    columns = sending[["messages", "bytes"]].to_numpy() / seconds[:, None]
    (latency, per_byte), residual = nonnegative(columns)
    error = math.sqrt(residual / len(columns))
    return LinkFit(
        latency_s=_estimate(columns, 0, float(latency), residual),
        bandwidth=_inverse(_estimate(columns, 1, float(per_byte), residual)),
        error=error,
        points=points,
        caution=" ".join(_cautions(sending, columns, points, float(per_byte))),
    )


def _sending(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that communicated, with messages, bytes and seconds per rank and step."""
    told = runs[(runs["ranks"] > 1) & (runs["wire_bytes_per_step"] > 0)].copy()
    told["bytes"] = told["wire_bytes_per_step"] / told["ranks"]
    told["messages"] = 2 * (told["ranks"] - 1) * told["reductions_per_step"].fillna(1)
    told["link_s"] = told["comm_s"] - told["coding_s"].fillna(0)
    return told[told["link_s"] > 0]


def _estimate(columns: Array, which: int, value: float, residual: float) -> Estimate:
    held, free = columns[:, which], columns[:, [1 - which]]

    def residual_at(cost: float) -> float:
        return nonnegative(free, 1 - cost * held)[1]

    span = profile_interval(
        residual_at, value, residual, rows=len(columns), coefficients=2, upper=None
    )
    return Estimate(value, *span) if span else Estimate(value)


def _inverse(cost: Estimate) -> Estimate:
    """Return a bandwidth from seconds per byte; a cost that may be 0 has no upper bound."""
    value = 1 / cost.value if cost.value > 0 else math.inf
    if cost.low is None or cost.high is None:
        return Estimate(value)
    return Estimate(value, 1 / cost.high, 1 / cost.low if cost.low > 0 else None)


def _cautions(sending: pd.DataFrame, columns: Array, points: int, per_byte: float) -> list[str]:
    told = []
    if points == 2:
        told.append("Two rows determine it exactly, so the fit cannot tell whether it holds.")
    norms = np.linalg.norm(columns, axis=0)
    if float(columns[:, 0] @ columns[:, 1]) > _PARALLEL * norms[0] * norms[1]:
        told.append(
            "Not identifiable: messages and bytes rise together in these rows, so latency and "
            "bandwidth cannot be told apart. Measure more bits, or more sizes."
        )
    if sending["ranks"].nunique() == 1:
        told.append(
            "All rows have the same ranks: the latency holds every cost that bytes do not change."
        )
    if per_byte == 0:
        told.append("More bytes took no longer, so no bandwidth can be given.")
    if sending["reductions_per_step"].isna().any():
        told.append(
            "How many reductions a step takes is not recorded: the latency is that of 2 (p - 1) "
            "messages, all reductions of a step together."
        )
    if sending["coding_s"].isna().any():
        told.append("Coding is not recorded, so it counts as communication.")
    return told
