"""Limitations of a study's numbers; pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from qsgd_hpc.launch.cluster.network import SHORT, bits_per_s
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.quality import ACCURACY
from qsgd_hpc.scaling.analysis.results import Analysis, CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.stats import ORDERED_FROM, proportion_bound

__all__ = ["Machine", "cautions"]

_Place = tuple[CaseAnalysis, Row]

# Efficiency that exceeds 1 by more than this is questioned.
ABOVE_IDEAL = 0.1


class Machine(str, Enum):
    """Limitations if all nodes were parts of one machine, by the kind of these nodes."""

    ONE = (
        "One machine: All ranks ran on one host. Its “nodes” are groups of ranks that share "
        "cores and memory bandwidth, and bytes are sent through memory, not a network. A "
        "speed-up below ideal is expected, and compression saves less time than between real "
        "nodes."
    )
    PARTS = (
        "One machine: The hosts are parts of one machine (namespaces or containers); the "
        "site's profile describes the network between them. They share memory bandwidth, "
        "caches, and cores unless the profile assigns a share of the cores to each."
    )
    EMULATED = (
        "Emulated network: The nodes are emulated on one machine, each with a link of the "
        "given rate. Bytes take as long as on a network of that rate, so the effect of "
        "compression on such a network is measured. But the hosts share this machine's cores, "
        "caches and memory, so more nodes do not compute faster, and sending bytes takes time "
        "on the same cores."
    )


def cautions(analysis: Analysis, *, mode: str, machine: Machine | None) -> tuple[str, ...]:
    """Return the cautions of a study, each as 'Head: Sentences.'

    Args:
        machine: the machine on which all ranks ran; None if there were several.
    """
    rows: list[_Place] = [(case, row) for case in analysis.cases for row in case.rows()]
    return (
        *_noise(rows),
        *_above_ideal(rows),
        *((machine.value,) if machine else ()),
        *_short_links(rows),
        *_hidden(rows),
        *_quality(analysis, mode),
        *analysis.cautions,
    )


def _short_links(rows: list[_Place]) -> Iterator[str]:
    short = [pair for pair in rows if (pair[1]["link_share"] or 1) < SHORT]
    if short:
        case, row = min(short, key=lambda pair: pair[1]["link_share"])
        yield (
            f"Short links: In {len(short)} of {len(rows)} rows a link reached less than "
            f"{units.percent(SHORT)} of its rate before or after a run, at worst "
            f"{bits_per_s(row['link_bits_s'])} ({_place(case, row)}): the cores may have been "
            "too busy to process more. Such a row applies to the slower network; the tables "
            "mark it."
        )


def _noise(rows: list[_Place]) -> Iterator[str]:
    fewest = min(row["repeats"] for _, row in rows)
    if fewest == 1:
        yield (
            "Noise: At least one size was measured once, so it has no interval, and the "
            "variation between runs is unknown. Use three or more repeats (--repeats 3) to "
            "measure it."
        )
        return
    case, wide = max(rows, key=lambda pair: _width(pair[1]))
    method = (
        f"Student's t of {units.count(fewest, 'repeat')}, wide because of the few repeats; "
        f"{ORDERED_FROM} or more narrow it"
        if fewest < ORDERED_FROM
        else f"bounded by two of {fewest} or more repeats"
    )
    yield (
        f"Noise: Values are medians with 95% intervals ({method}). The widest interval of a "
        f"throughput spans {units.percent(_width(wide))} of its median ({_place(case, wide)}). "
        "Where the interval of a ratio includes 1, no difference is claimed. One in twenty "
        "comparisons of equal speeds shows a difference by chance."
    )


def _width(row: Row) -> float:
    if row["throughput_lo"] is None:
        return 0.0
    return float((row["throughput_hi"] - row["throughput_lo"]) / row["throughput"])


def _place(case: CaseAnalysis, row: Row) -> str:
    return f"{case.case.label}, {units.nodes_name(row['nodes'])}, {units.bits_name(row['bits'])}"


def _above_ideal(rows: list[_Place]) -> Iterator[str]:
    above = [pair for pair in rows if pair[1]["efficiency"] > 1 + ABOVE_IDEAL and _bounded(*pair)]
    if above:
        case, most = max(above, key=lambda pair: pair[1]["efficiency"])
        yield (
            f"Above ideal: {_place(case, most)} reaches {units.percent(most['efficiency'])} of "
            "ideal. Caches can explain a small part; more often other work slowed down the "
            "reference. Measure again on a quiet machine before using this result."
        )


def _bounded(case: CaseAnalysis, row: Row) -> bool:
    """Return whether ideal is a bound for a row.

    It is none for fewer bits than the reference's if the reference has several ranks.
    """
    ranks, bits = case.reference
    return ranks == 1 or row["bits"] == bits


def _hidden(rows: list[_Place]) -> Iterator[str]:
    sending = [row for _, row in rows if row["comm_time_share"] is not None and row["ranks"] > 1]
    if any(row["exposed_share"] is None for row in sending):
        yield (
            "Hidden communication: At least one script records the time in collectives, but "
            "not the time that training waited for them. Its share of communication includes "
            "overlapped communication, so it is not the time that compression could save."
        )


def _quality(analysis: Analysis, mode: str) -> Iterator[str]:
    if any("digits" in (case.dataset or "") for case in analysis.cases):
        yield (
            "Data: At least one case trains on the small built-in digits set, not on MNIST. Its "
            "epochs are small, and its accuracies are not comparable with those of MNIST."
        )
    yield from _test_set(analysis)
    yield from _one_value(analysis)
    if any("synthetic" in (case.dataset or "") for case in analysis.cases):
        yield (
            "Data: At least one case trains on synthetic data. Speeds and bytes are valid; "
            "accuracy, perplexity and loss do not apply to real data."
        )
    if mode == "weak" and any(case.quality for case in analysis.cases):
        yield (
            "Quality: In weak scaling the global batch grows with the ranks, which changes the "
            "quality, too. Compare bits at one size, not sizes."
        )


def _test_set(analysis: Analysis) -> Iterator[str]:
    """Yield the effect of chance on an accuracy, for the case with the smallest test set."""
    known = [c for c in analysis.cases if c.quality == ACCURACY.column and c.test_samples]
    if not known:
        return
    case = min(known, key=lambda c: c.test_samples or 0)
    count, noun = case.test_samples or 0, units.sample(case.unit)
    middle = float(case.table[case.quality].median())
    bound = proportion_bound(middle, middle, samples=count, comparisons=case.comparisons)
    yield (
        f"Test set: {count:,} test {noun} ({case.case.label}), so one is worth "
        f"{units.points(1 / count)[1:]}, and two equally good trainings may differ by "
        f"{units.points(bound)[1:]} by chance. A smaller loss is not counted. All bits are "
        f"tested with the same {noun}, so the effect of chance is smaller than that bound."
    )


def _one_value(analysis: Analysis) -> Iterator[str]:
    """Yield a caution if repeats do not show the noise of the quality."""
    rows = [
        case.runs_of(row)[case.quality].dropna()
        for case in analysis.cases
        if case.quality
        for row in case.rows()
    ]
    repeated = [values for values in rows if len(values) > 1]
    same = [values for values in repeated if values.nunique() == 1]
    if same:
        yield (
            f"Same quality: In {len(same)} of {len(repeated)} rows all repeats reached the same "
            "quality, as trainings with the same seed do. They count as one run, and no "
            "interval is given. To measure the effect of chance, give each repeat a different "
            "seed."
        )
