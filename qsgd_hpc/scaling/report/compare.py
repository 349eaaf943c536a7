"""Comparison of two studies: rows of equal case, ranks and bits, and different origins."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.verdicts import SAME_MARGIN, Verdict, compare_rows
from qsgd_hpc.scaling.define.study import Case, global_batch
from qsgd_hpc.scaling.report.tables import place

if TYPE_CHECKING:
    from qsgd_hpc.scaling.report.report import Report

__all__ = ["HEADINGS", "Comparison", "Pair", "compare", "pair_cells", "section", "summary"]

WORDS = ("faster", "slower", "same", "unclear", "once")
# Facts that differ between any two studies.
_PASSING = ("Measured", "Load")
HEADINGS = (
    ("place", "Point"),
    ("ours", "This study"),
    ("theirs", "The other"),
    ("ratio", "Ratio"),
    ("interval", "95% interval"),
    ("verdict", "Verdict"),
)


@dataclass(frozen=True)
class Pair:
    """A row that both studies have.

    Attributes:
        row, other: the table rows of this study and of the other.
        verdict: on this study's throughput compared with the other's.
    """

    case: Case
    unit: str
    row: Row
    other: Row
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """The comparison of two studies.

    Attributes:
        ours, theirs: their names.
        pairs: the rows that both have.
        differences: (fact, this study's value, the other's value) of their origins.
        alone: numbers of rows that only this study has, and that only the other has.
    """

    ours: str
    theirs: str
    pairs: tuple[Pair, ...]
    differences: tuple[tuple[str, str, str], ...]
    alone: tuple[int, int]


def compare(report: Report, other: Report, names: tuple[str, str]) -> Comparison:
    """Join two studies by case, ranks, bits and global batch.

    Strong and weak scaling have the same batch at one rank only.

    Raises:
        UsageError: they share no row, or count different units.
    """
    mine, theirs = _rows(report), _rows(other)
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise UsageError(
            f"studies {names[0]!r} and {names[1]!r} have no point in common (case, ranks, "
            f"bits).\n{names[0]}: {_cases(report)}\n{names[1]}: {_cases(other)}\n"
            "Compare studies of the same workload, framework, batch size, algorithm and mode."
        )
    for key in shared:
        ours, others = mine[key][0].unit, theirs[key][0].unit
        if ours != others:
            raise UsageError(
                f"{key[0].label}: {names[0]!r} counts {ours}/s, {names[1]!r} {others}/s. "
                "Record the same unit in both."
            )
    return Comparison(
        ours=names[0],
        theirs=names[1],
        pairs=tuple(
            Pair(case.case, case.unit, row, theirs[key][1], compare_rows(mine[key], theirs[key]))
            for key in shared
            for case, row in [mine[key]]
        ),
        differences=_differences(report, other),
        alone=(len(mine) - len(shared), len(theirs) - len(shared)),
    )


def summary(comparison: Comparison) -> str:
    """Return the number of rows with each verdict, in one line."""
    words = [p.verdict.word for p in comparison.pairs]
    counts = [
        f"{words.count(word)} {'measured once' if word == 'once' else word}"
        for word in WORDS
        if word in words
    ]
    return f"{comparison.ours} compared with {comparison.theirs}: {', '.join(counts)}"


def pair_cells(pair: Pair, *, several: bool) -> dict[str, str]:
    """Return a pair as text, keyed like HEADINGS."""
    ratio = pair.verdict.ratio
    case = f"{pair.case.label}: " if several else ""
    return {
        "place": case + place(pair.row),
        "ours": units.rate(pair.row["throughput"], pair.unit),
        "theirs": units.rate(pair.other["throughput"], pair.unit),
        "ratio": units.times(ratio.value),
        "interval": units.interval(ratio.low, ratio.high) or "one run",
        "verdict": "undecided" if pair.verdict.word == "once" else pair.verdict.word,
    }


def section(comparison: Comparison) -> dict[str, Any]:
    """Return the values of a comparison for the templates."""
    several = len({p.case for p in comparison.pairs}) > 1
    return {
        "ours": comparison.ours,
        "theirs": comparison.theirs,
        "summary": summary(comparison),
        "headings": HEADINGS,
        "rows": [
            {**pair_cells(p, several=several), "raw_bits": p.row["bits"]} for p in comparison.pairs
        ],
        "differences": comparison.differences,
        "note": _note(comparison),
    }


def _note(comparison: Comparison) -> str:
    notes = [
        "Faster, slower: the interval of the ratio excludes 1. Same: the interval is within "
        f"{units.percent(SAME_MARGIN)} of 1. Unclear: the noise could hide a difference. "
        "Undecided: measured once, so the noise is unknown."
    ]
    for count, name in zip(comparison.alone, (comparison.ours, comparison.theirs), strict=True):
        if count:
            notes.append(f"{units.count(count, 'row')} only in {name}.")
    return " ".join(notes)


def _rows(report: Report) -> dict[tuple[Case, int, int, int], tuple[CaseAnalysis, Row]]:
    mode = report.study.mode
    return {
        (case.case, ranks, row["bits"], global_batch(mode, case.case, ranks)): (case, row)
        for case in report.analysis.cases
        for row in case.rows()
        for ranks in [row["ranks"]]
    }


def _cases(report: Report) -> str:
    labels = "; ".join(case.case.label for case in report.analysis.cases)
    return f"{labels} ({report.study.mode} scaling)"


def _arguments(report: Report) -> str:
    """Return the arguments and limits of the trainings."""
    return "; ".join(
        f"{each.name}: {shlex.join([*each.args, *each.limit_words()]) or 'none'}"
        for each in report.study.programs
    )


def _differences(report: Report, other: Report) -> tuple[tuple[str, str, str], ...]:
    mine, theirs = (
        {
            "Mode": f"{each.study.mode} scaling",
            "Arguments": _arguments(each),
            **dict(each.origins.facts),
        }
        for each in (report, other)
    )
    named = [label for label in {**mine, **theirs} if label not in _PASSING]
    return tuple(
        (label, mine.get(label, units.MISSING), theirs.get(label, units.MISSING))
        for label in named
        if mine.get(label) != theirs.get(label)
    )
