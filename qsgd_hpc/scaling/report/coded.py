"""What compressing did to the gradients: what the codes lost, and what went uncoded; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.quality_verdict import compare_quality
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.analysis.verdicts import Row, largest_rows, plain_row
from qsgd_hpc.scaling.define.plan import PLAIN_BITS

__all__ = ["coded_sentences"]

# docs/compression.md, "What a code loses".
UNNOTICED = 0.1


def coded_sentences(case: CaseAnalysis) -> tuple[str, ...]:
    """Return what the codes lost, and what of the gradients was not coded although it was asked.

    Empty where nothing was compressed, and of records that do not tell.
    """
    return (*_lost(case), *_uncoded(case.runs))


def _lost(case: CaseAnalysis) -> Iterator[str]:
    told = [row for row in case.rows() if row["nmse"] is not None]
    if not told:
        return
    largest = [row for row in told if row["ranks"] == told[-1]["ranks"]]
    lost = ", ".join(
        f"{units.share(row['nmse'])} with {units.bits_name(row['bits'])} "
        f"(NMSE {units.nmse(row['nmse'])})"
        for row in largest
    )
    noticed = any(row["nmse"] >= UNNOTICED for row in largest)
    more = "; near and above 1 it needs error feedback" if noticed else ""
    more += _exceptions(case, largest)
    yield (
        f"Of the squared magnitude that it carried, coding lost {lost}. "
        f"As a rule, training does not notice an NMSE below {UNNOTICED}{more}."
    )


def _exceptions(case: CaseAnalysis, rows: Sequence[Row]) -> str:
    """Name the rows that the rule would have called as good as fp32, and that were not."""
    plain = plain_row(largest_rows(case))
    lost = [
        units.bits_name(row["bits"])
        for row in rows
        if row["nmse"] < UNNOTICED and compare_quality(case, row, plain).word == "worse"
    ]
    return f"; here {' and '.join(lost)} did cost quality" if lost else ""


def _uncoded(runs: pd.DataFrame) -> Iterator[str]:
    several = runs[(runs["ranks"] > 1) & (runs["bits"] != PLAIN_BITS)]
    for bits in sorted(set(several["bits"]), reverse=True):
        told = several[(several["bits"] == bits) & (several["asked_tensors"] > 0)]
        if not told["plain_tensors"].any():
            continue
        tensors = units.span(told["plain_tensors"], "{:.0f}".format)
        share = units.span(told["plain_elements"] / told["asked_elements"], units.percent)
        asked_tensors = int(told["asked_tensors"].max())
        which = f"{tensors} of {asked_tensors} tensors ({share} of the elements)"
        asked = f"with {units.bits_name(bits)} asked for"
        if (told["declined_tensors"] == told["plain_tensors"]).all():
            yield f"The planner sent {which} as float32 {asked}."
        else:
            yield f"{which} travelled as float32 {asked}."
