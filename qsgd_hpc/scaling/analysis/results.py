"""Results of a study's analysis, as data: compute.py computes them, the report shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from qsgd_hpc.scaling.define.study import Case

__all__ = [
    "BREAKDOWN",
    "COLUMNS",
    "Analysis",
    "BreakEven",
    "CaseAnalysis",
    "Estimate",
    "Fit",
    "LinkFit",
    "Row",
]

Row = Mapping[str, Any]
"""A row of a case's table; missing values are None."""

BREAKDOWN = ("compute_s", "exposed_s", "data_s")
"""Parts of a step, in seconds; they add up to its mean. Hidden communication and coding overlap."""

# Order of results.csv after the case's own columns. A name carries its unit; shares and accuracies
# run from 0 to 1; _lo and _hi bound a 95 % interval and are empty with one repeat.
COLUMNS = (
    *("nodes", "ranks", "bits", "repeats"),
    *("throughput", "throughput_lo", "throughput_hi"),
    *("speedup", "speedup_lo", "speedup_hi"),
    *("efficiency", "efficiency_lo", "efficiency_hi"),
    *("step_s", "compute_s", "exposed_s", "data_s", "hidden_s", "coding_s"),
    *("exposed_share", "comm_time_share"),
    *("wire_bytes_per_step", "wire_bytes_total", "compression_ratio", "nmse", "train_loss"),
    *("test_accuracy", "test_accuracy_lo", "test_accuracy_hi"),
    *("perplexity", "perplexity_lo", "perplexity_hi"),
    *("time_to_target_s", "steps", "global_batch_size", "link_bits_s", "link_share"),
)


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; the bounds are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """A scaling law fitted to one series (the sizes measured at these bits).

    Attributes:
        law: "amdahl", "gustafson" or "usl".
        bits: the series.
        parameters: "serial" (Amdahl, Gustafson); "contention" and "coherency" (USL).
        error: root mean square of the relative residuals of the speed-up, 0..1.
        sizes: number of sizes in the fit.
        caution: limitations as text; may be empty.
        applies: whether the law is one of the study's mode.
    """

    law: str
    bits: int
    parameters: Mapping[str, Estimate]
    error: float
    sizes: int
    caution: str = ""
    applies: bool = True

    def speedup(self, ranks: float) -> float:
        """Return the law's speed-up over one rank."""
        values = {name: estimate.value for name, estimate in self.parameters.items()}
        if self.law == "amdahl":
            return ranks / (1 + values["serial"] * (ranks - 1))
        if self.law == "gustafson":
            return ranks - values["serial"] * (ranks - 1)
        contention, coherency = values["contention"], values["coherency"]
        return ranks / (1 + contention * (ranks - 1) + coherency * ranks * (ranks - 1))


@dataclass(frozen=True)
class LinkFit:
    """Hockney's model fitted to the communication of the sizes measured, T = a messages + b bytes.

    Attributes:
        latency_s: seconds per message; bandwidth: bytes per second of one rank.
        error: root mean square of the relative residuals, 0..1.
        points: number of rows in the fit.
        caution: limitations as text; may be empty.
    """

    latency_s: Estimate
    bandwidth: Estimate
    error: float
    points: int
    caution: str = ""


@dataclass(frozen=True)
class BreakEven:
    """The verdict on compression, for one row compared with fp32 at the largest size.

    Attributes:
        bits: bits of the row.
        bandwidth: bytes per second and rank above which fp32 trains faster; infinite where coding
            costs nothing measurable, None if unknown.
        measured: bandwidth that this study measured, bytes per second and rank; None if unknown.
        verdict: "yes", "no" or "undecided" (inside the noise).
        reason: one sentence with the numbers.
    """

    bits: int
    bandwidth: float | None
    measured: float | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class CaseAnalysis:
    """One case of a study.

    Attributes:
        case: what was trained.
        unit: what throughput counts per second: "images", "words", "steps".
        quality: the column with the quality of the training: "test_accuracy", "perplexity" or "".
        target: the quality that time_to_target_s refers to; None if there is none.
        table: one row per (nodes, ranks, bits), fp32 first at each size; columns COLUMNS.
        runs: one row per measurement; the table's values are medians of these.
        curves: one row per recorded epoch: nodes, ranks, bits, repeat, epoch, elapsed_s,
            train_loss, test_accuracy, perplexity.
        reference: (ranks, bits) of the row whose speed-up is 1.
        dataset: the data sets that the scripts recorded.
        test_samples: the smallest test set that a run recorded; None if none did.
        comparisons: number of rows in the complete study that are compared with fp32.
    """

    case: Case
    unit: str
    quality: str
    target: float | None
    table: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame
    reference: tuple[int, int]
    dataset: str | None = None
    fits: tuple[Fit, ...] = ()
    link: LinkFit | None = None
    break_even: tuple[BreakEven, ...] = ()
    test_samples: int | None = None
    comparisons: int = 1

    def runs_of(self, row: Row) -> pd.DataFrame:
        """Return the measurements that a row of the table summarises."""
        same = [self.runs[key].to_numpy() == row[key] for key in ("nodes", "ranks", "bits")]
        return self.runs[same[0] & same[1] & same[2]]

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows as dicts, missing values as None."""
        return [
            {k: (None if pd.isna(v) else v) for k, v in row.items()}
            for row in self.table.to_dict("records")
        ]


@dataclass(frozen=True)
class Analysis:
    """A study, case by case, in the order of its definition."""

    cases: tuple[CaseAnalysis, ...]
    cautions: tuple[str, ...] = field(default=())
