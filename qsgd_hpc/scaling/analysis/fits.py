"""Fits of a case: the scaling laws of its speed, and Hockney's model of its communication.

Laws. With X(p) the throughput of p ranks and X(1) = A, free in every fit:

- Amdahl (AFIPS 1967), the work is fixed: X = A p / (1 + s (p - 1)), s the serial share of the time
  of one rank.
- Gustafson (CACM 1988), the work grows with the ranks: X = A (p - s (p - 1)), s the serial share of
  the time of a parallel run.
- Universal scalability law (Gunther, Guerrilla Capacity Planning, 2007):
  X = A p / (1 + contention (p - 1) + coherency p (p - 1)); with coherency > 0, throughput falls
  from some number of ranks.

Each is linear in non-negative coefficients once relative residuals of p / X (Gustafson: of X) are
minimised, so the best fit is unique and its parameters stay in their bounds: shares in [0, 1],
coherency >= 0. Residuals of p / X are relative to the run's own p / X, and those of X to the median
X of the same number of ranks: relative to its own X, one slow run would outweigh all others.
Residuals of T are relative to the mean T of the same ranks and bits: relative to its own T, the
fastest runs would weigh most, and both costs would be too low.

Link. T = latency * messages + bytes / bandwidth (Hockney, The communication challenge for MPP,
Parallel Computing 20, 1994), per rank and step. T is the time in collectives minus the time of
coding, so it includes waiting for slower ranks. A reduction by p ranks in two phases, each rank
exchanging with all others or around a ring, takes 2 (p - 1) messages; bytes are counted. Bits vary
the bytes at equal messages and ranks vary the messages, which separates the two.

Intervals. The interval of a quantity holds the values at which the best fit of everything else has
a sum of squares of at most best * (1 + F(1, freedom) / freedom): Bates and Watts, Nonlinear
Regression Analysis, 1988, chapter 6. For models that are linear once the quantity is fixed this is
exact for normal noise, also for ratios of coefficients and at bounds. Runs must outnumber the
parameters, by repeats or by sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import optimize, special

from qsgd_hpc.scaling.analysis.results import Estimate, Fit, LinkFit
from qsgd_hpc.scaling.analysis.stats import LEVEL
from qsgd_hpc.scaling.define.study import PLAIN_BITS

__all__ = ["applies", "fit_law", "fit_laws", "fit_link", "peak_ranks"]

Array = npt.NDArray[Any]

# A mean of squared relative residuals up to this is a rounding error.
ROUNDING = 1e-20


def _nonnegative(columns: Array, target: Array) -> tuple[Array, float]:
    """Return the coefficients >= 0 of the best fit to a target, and its sum of squares.

    Args:
        columns: shape (rows, coefficients), none of them all zeros.
        target: shape (rows,).
    """
    # Scaled, because a model's columns can be magnitudes apart.
    scale = np.linalg.norm(columns, axis=0)
    best, residual = optimize.nnls(columns / scale, target)
    return best / scale, float(residual) ** 2


@dataclass(frozen=True)
class _Model:
    """Least squares of columns, shape (runs, coefficients), against a target, shape (runs,).

    The coefficients are not negative. Of a law, the first two add up to 1 / A (Gustafson: A); the
    serial share is the second one divided by that sum.
    """

    columns: Array
    target: Array

    @cached_property
    def best(self) -> tuple[Array, float]:
        """The coefficients of the best fit, and its sum of squares."""
        return _nonnegative(self.columns, self.target)

    @property
    def freedom(self) -> int:
        return int(self.columns.shape[0] - self.columns.shape[1])

    def shares(self) -> dict[str, float] | None:
        """Return a law's parameters; None if its throughput of one rank is infinite.

        "serial" and "contention" are the same share.
        """
        best, _ = self.best
        whole = best[0] + best[1]
        if not whole:
            return None
        share = float(best[1] / whole)
        coherency = float(best[2] / whole) if len(best) > 2 else 0.0
        return {"serial": share, "contention": share, "coherency": coherency}

    def share(self, name: str, value: float) -> Estimate:
        """Return a law's parameter with its interval."""
        first, second, *others = self.columns.T

        def residual_at(held: float) -> float:
            if name == "coherency":
                free = [first + held * others[0], second + held * others[0]]
            else:
                free = [(1 - held) * first + held * second, *others]
            return _nonnegative(np.stack(free, axis=1), self.target)[1]

        return self._profile(residual_at, value, upper=None if name == "coherency" else 1.0)

    def cost(self, which: int) -> Estimate:
        """Return one of two coefficients with its interval."""
        held, free = self.columns[:, which], self.columns[:, [1 - which]]

        def residual_at(cost: float) -> float:
            return _nonnegative(free, self.target - cost * held)[1]

        return self._profile(residual_at, float(self.best[0][which]), upper=None)

    def _profile(
        self, residual_at: Callable[[float], float], best: float, *, upper: float | None
    ) -> Estimate:
        """Return a quantity in [0, upper] with its 95 % interval; none without spare runs.

        Args:
            residual_at: sum of squares of the best fit with the quantity fixed at a value.
            best: its best value.
            upper: its largest possible value; None if there is none.
        """
        if self.freedom < 1:
            return Estimate(best)
        limit = self.best[1] * (1 + float(special.fdtri(1, self.freedom, LEVEL)) / self.freedom)
        limit += ROUNDING * len(self.target)

        def excess(held: float) -> float:
            return residual_at(held) - limit

        top = _outside(excess, best) if upper is None else upper
        return Estimate(best, _crossing(excess, best, 0.0), _crossing(excess, best, top))

    def deviates(self, sizes: Array) -> bool:
        """Return whether sizes deviate from it more than runs of one size vary (F test, 5 %).

        The columns of one size must be proportional to each other.

        Args:
            sizes: the size of each run, shape (runs,).
        """
        known = np.unique(sizes)
        spare, pure = len(known) - self.columns.shape[1], len(sizes) - len(known)
        if spare < 1 or pure < 1:
            return False
        # One of proportional columns is sufficient.
        logs = np.log(self.columns[:, 0]) - np.log(self.target)
        of_sizes = [logs[sizes == size] for size in known]
        within = sum(float(((own - own.mean()) ** 2).sum()) for own in of_sizes)
        between = max(self.best[1] - within, 0.0)
        if within <= ROUNDING * len(sizes):
            return between > 1e-9
        ratio = (between / spare) / (within / pure)
        return bool(ratio > special.fdtri(spare, pure, LEVEL))


def _outside(excess: Callable[[float], float], best: float) -> float:
    """Return a value above the interval; the search ends at 10^18 times the start."""
    step = max(best, 1e-15)
    for _ in range(60):
        if excess(best + step) > 0:
            break
        step *= 2
    return best + step


def _crossing(excess: Callable[[float], float], inside: float, bound: float) -> float:
    if inside == bound or excess(bound) <= 0:
        return bound
    if excess(inside) >= 0:  # a fit that is exact but for rounding
        return inside
    tolerance = 1e-9 * max(abs(inside), abs(bound))
    return float(optimize.brentq(excess, inside, bound, xtol=tolerance, rtol=1e-9))


# Columns more parallel than this (cosine) inflate the variance of both costs more than tenfold.
_PARALLEL = 0.95


def fit_link(runs: pd.DataFrame) -> LinkFit | None:
    """Fit latency and bandwidth to the runs of a case; None with fewer than two usable rows.

    Relative residuals are minimised, with both costs >= 0.
    """
    sending = _sending(runs)
    rows = sending.groupby(["ranks", "bits"])
    if rows.ngroups < 2:
        return None
    usual = rows["link_s"].transform("mean").to_numpy()
    columns = sending[["messages", "bytes"]].to_numpy() / usual[:, None]
    model = _Model(columns, sending["link_s"].to_numpy() / usual)
    return LinkFit(
        latency_s=model.cost(0),
        bandwidth=_inverse(model.cost(1)),
        error=math.sqrt(model.best[1] / len(columns)),
        points=rows.ngroups,
        caution=" ".join(_link_cautions(sending, model, rows.ngroup().to_numpy())),
    )


def _sending(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with communication, with messages, bytes and seconds per rank and step."""
    rows = runs[(runs["ranks"] > 1) & (runs["wire_bytes_per_step"] > 0)].copy()
    rows["bytes"] = rows["wire_bytes_per_step"] / rows["ranks"]
    rows["messages"] = 2 * (rows["ranks"] - 1) * rows["reductions_per_step"].fillna(1)
    rows["link_s"] = rows["comm_s"] - rows["coding_s"].fillna(0)
    return rows[(rows["link_s"] > 0) & (rows["messages"] > 0)]


def _inverse(cost: Estimate) -> Estimate:
    """Return a bandwidth from seconds per byte; a cost that may be 0 has no upper bound."""
    value = 1 / cost.value if cost.value > 0 else math.inf
    if cost.low is None or cost.high is None:
        return Estimate(value)
    return Estimate(value, 1 / cost.high, 1 / cost.low if cost.low > 0 else None)


def _link_cautions(sending: pd.DataFrame, model: _Model, rows: Array) -> list[str]:
    cautions = []
    points, costs = len(np.unique(rows)), model.best[0]
    if points == 2 and (costs > 0).all():
        cautions.append(
            "Two rows determine it exactly, so the fit cannot show whether the model applies."
        )
    norms = np.linalg.norm(model.columns, axis=0)
    if float(model.columns[:, 0] @ model.columns[:, 1]) > _PARALLEL * norms[0] * norms[1]:
        cautions.append(
            "Not identifiable: messages and bytes increase together in these rows, so latency "
            "and bandwidth cannot be separated. Measure more bits or more sizes."
        )
    if points > 2 and model.deviates(rows):
        cautions.append(
            "The deviation from the model exceeds the variation of the repeats: both values are "
            "rough."
        )
    if sending["ranks"].nunique() == 1:
        cautions.append(
            "All rows have the same ranks: the latency contains every cost that does not "
            "depend on bytes."
        )
    if costs[1] == 0:
        cautions.append(
            "The time did not increase with the bytes, so there is no estimate of the bandwidth."
        )
    if sending["reductions_per_step"].isna().any():
        cautions.append(
            "The number of reductions per step is not recorded: the latency is that of 2 (p - "
            "1) messages, for all reductions of a step together."
        )
    if sending["coding_s"].isna().any():
        cautions.append("Coding is not recorded, so it counts as communication.")
    return cautions


LAWS = ("amdahl", "gustafson", "usl")
_FIXED_WORK = {"amdahl": True, "gustafson": False}


def applies(law: str, mode: str) -> bool:
    """Return whether a law applies to a mode; Gunther's applies to both."""
    return _FIXED_WORK.get(law, mode == "strong") == (mode == "strong")


def fit_laws(runs: pd.DataFrame, mode: str) -> tuple[Fit, ...]:
    """Fit all laws to every series of a case: the runs at some bits, and the runs of one rank.

    Laws that apply to the mode come first; the cautions of the others state that they do not apply.
    """
    laws = sorted(LAWS, key=lambda law: not applies(law, mode))
    found = []
    for bits in sorted(runs["bits"].unique(), reverse=True):
        series = runs[(runs["bits"] == bits) | (runs["ranks"] == 1)]
        if bits == PLAIN_BITS or series["ranks"].max() > 1:
            ranks, speeds = series["ranks"].to_numpy(float), series["throughput"].to_numpy(float)
            found += [fit_law(law, int(bits), ranks, speeds, mode) for law in laws]
    return tuple(fit for fit in found if fit is not None)


def fit_law(law: str, bits: int, ranks: Array, speeds: Array, mode: str) -> Fit | None:
    """Fit one law to runs; None if they do not determine its parameters.

    Fewer sizes than parameters never do. Neither does Gunther's law without one rank if throughput
    falls so steeply that only coherency is left: X(1) is then infinite.

    Args:
        ranks, speeds: one entry per run, shape (runs,); speeds are throughputs above 0.
        mode: "strong" or "weak", for the caution.
    """
    sizes = len(np.unique(ranks))
    names = ("contention", "coherency") if law == "usl" else ("serial",)
    if sizes < len(names) + 1:
        return None
    model = _model(law, ranks, speeds)
    values = model.shares()
    if values is None:
        return None
    parameters = {name: model.share(name, values[name]) for name in names}
    plain = Fit(law, bits, parameters, 0.0, sizes, applies=applies(law, mode))
    error = _error(plain, ranks, speeds)
    caution = " ".join(_cautions(plain, model, ranks, mode))
    return replace(plain, error=error, caution=caution)


def peak_ranks(fit: Fit) -> Estimate | None:
    """Return the ranks of most throughput under the USL, sqrt((1 - contention) / coherency).

    None for other laws, and if coherency is 0: then more ranks never reduce throughput. The
    interval combines the bounds of the parameters' intervals, so it covers more than 95 %; it has
    no upper bound if the interval of coherency contains 0.
    """
    if fit.law != "usl":
        return None
    contention, coherency = fit.parameters["contention"], fit.parameters["coherency"]
    if coherency.value <= 0:
        return None

    def peak(share: float, cost: float) -> float:
        return max(1.0, math.sqrt((1 - share) / cost))

    best = peak(contention.value, coherency.value)
    if None in (contention.low, contention.high, coherency.low, coherency.high):
        return Estimate(best)
    assert contention.high is not None and coherency.high is not None
    assert contention.low is not None and coherency.low is not None
    high = peak(contention.low, coherency.low) if coherency.low > 0 else None
    return Estimate(best, peak(contention.high, coherency.high), high)


def _model(law: str, ranks: Array, speeds: Array) -> _Model:
    if law == "gustafson":
        usual = np.array([np.median(speeds[ranks == size]) for size in ranks])
        columns = np.stack([ranks, np.ones_like(ranks)], axis=1) / usual[:, None]
        return _Model(columns, speeds / usual)
    parts = [np.ones_like(ranks), ranks]
    if law == "usl":
        parts.append(ranks * (ranks - 1))
    columns = np.stack(parts, axis=1) * (speeds / ranks)[:, None]
    return _Model(columns, np.ones_like(ranks))


def _error(fit: Fit, ranks: Array, speeds: Array) -> float:
    """Return the root mean square of the relative residuals of the medians of all sizes."""
    sizes = np.unique(ranks)
    measured = np.array([np.median(speeds[ranks == size]) for size in sizes])
    ratio = measured / np.array([fit.speedup(float(size)) for size in sizes])
    relative = ratio / np.exp(np.log(ratio).mean()) - 1
    return float(np.sqrt((relative**2).mean()))


def _cautions(fit: Fit, model: _Model, ranks: Array, mode: str) -> list[str]:
    cautions = []
    if not fit.applies:
        held = "fixed work" if _FIXED_WORK[fit.law] else "work that grows with the ranks"
        cautions.append(f"Does not apply: it is the law of {held}; this study is {mode} scaling.")
    spare = fit.sizes - len(fit.parameters) - 1
    if spare == 0 and (model.best[0] > 0).all():
        cautions.append(
            f"{fit.sizes} sizes determine it exactly, so the fit cannot show whether the "
            "law applies."
        )
    if model.freedom < 1:
        cautions.append("No interval: there are not more runs than parameters.")
    if spare > 0 and model.deviates(ranks):
        cautions.append(
            "The deviation from the law exceeds the variation of the repeats: the law does not fit."
        )
    cautions += [
        f"The interval of the {name} share contains every possible value: the runs do not "
        "determine it."
        for name, estimate in fit.parameters.items()
        if name != "coherency" and (estimate.low, estimate.high) == (0, 1)
    ]
    cautions += [
        f"The {name} share is at its bound of {bound}."
        for name, estimate in fit.parameters.items()
        for bound in (0, 1)
        if name != "coherency" and abs(estimate.value - bound) < 1e-9
    ]
    return cautions
