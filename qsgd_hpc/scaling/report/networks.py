"""Comparison of cases that differ only in the network: where compression pays; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.verdicts import Judgement, plain_row, representative_judgement
from qsgd_hpc.scaling.report.findings import speed_words
from qsgd_hpc.scaling.report.tables import cells

__all__ = ["Family", "families", "gain"]


@dataclass(frozen=True)
class Family:
    """One case on several networks.

    Attributes:
        label: the case without its network, such as 'mnist (torch), batch 128'.
        members: the case on each network, the slowest first, shared memory last.
        nodes: nodes of the largest size that all of them have.
    """

    label: str
    members: tuple[CaseAnalysis, ...]
    nodes: int

    @property
    def unit(self) -> str:
        """The unit of throughput."""
        return self.members[0].unit

    def rows(self, member: CaseAnalysis) -> list[Row]:
        """Return a member's rows at the compared size, fp32 first."""
        return [row for row in member.rows() if row["nodes"] == self.nodes]

    @property
    def heading(self) -> str:
        """The heading of the comparison."""
        return f"Effect of the network: {self.label}, {units.nodes_name(self.nodes)}"

    @property
    def sentence(self) -> str:
        """Whether compression pays on each network, in agreement with the verdicts."""
        found = [
            (member, *judgement)
            for member in self.members
            if (judgement := representative_judgement(member, self.rows(member))) is not None
        ]
        sentences = [_network_sentence(*each) for each in found]
        speeds = {judged.speed.word for _, _, judged in found}
        if "once" in speeds:
            sentences.append(
                "At least three runs of each (--repeats 3) are needed to tell where "
                "compressing pays."
            )
        elif "unclear" in speeds:
            sentences.append("Use more repeats (--repeats) or a quieter machine.")
        return " ".join(sentences)

    def headings(self) -> list[tuple[str, str]]:
        """Return (key, name) of the table's columns that have values."""
        names = [("network", "Network"), ("bits", "Bits")]
        names += [("speed", f"{units.capitalised(self.unit)}/s"), ("ratio", "Over fp32")]
        if self.coded:
            names.append(("nmse", "NMSE"))
        if self.quality:
            names.append(("quality", units.quality_name(self.quality)))
        if self.targets:
            names += [("target", "To target"), ("sooner", "Sooner")]
        return [*names, ("link", "Link reached")]

    @property
    def coded(self) -> bool:
        """Whether any row has a coding error."""
        return any(r["nmse"] is not None for m in self.members for r in self.rows(m))

    @property
    def quality(self) -> str:
        """The column of the quality; empty unless all members have the same."""
        names = {member.quality for member in self.members}
        return names.pop() if len(names) == 1 else ""

    @property
    def targets(self) -> bool:
        """Whether any row has the time to its target."""
        return any(r["time_to_target_s"] for m in self.members for r in self.rows(m))

    def table(self) -> Iterator[dict[str, str]]:
        """Yield a row of text for each network and bits."""
        for member in self.members:
            rows = self.rows(member)
            plain = plain_row(rows)
            for row in rows:
                yield {
                    **cells(row, member),
                    "network": member.case.network_label,
                    "ratio": units.times(gain(row, plain, "throughput")),
                    "sooner": units.times(gain(row, plain, "time_to_target_s")),
                    "raw_bits": str(row["bits"]),
                }


def families(cases: Sequence[CaseAnalysis]) -> list[Family]:
    """Return the cases measured on two or more networks, in the order of their first members."""
    found: dict[object, list[CaseAnalysis]] = {}
    for case in cases:
        found.setdefault(replace(case.case, network=""), []).append(case)
    made = []
    for members in found.values():
        sizes = set.intersection(*({r["nodes"] for r in m.rows()} for m in members))
        if len(members) > 1 and max(sizes, default=1) > 1:
            members.sort(key=_rate)
            label = replace(members[0].case, network="").label
            made.append(Family(label, tuple(members), max(sizes)))
    return made


def _rate(case: CaseAnalysis) -> tuple[float, float]:
    network = parse_network(case.case.network or None)
    return (math.inf, 0.0) if network is None else (network.rate_bits_s, -network.latency_us)


def gain(row: Row, plain: Row | None, column: str) -> float | None:
    """Return how many times faster or sooner a row is than fp32; None for fp32 or if unknown."""
    if plain is None or row is plain or not (row[column] and plain[column]):
        return None
    more, less = (plain, row) if column == "time_to_target_s" else (row, plain)
    return float(more[column] / less[column])


def _network_sentence(case: CaseAnalysis, row: Row, judged: Judgement) -> str:
    """Return a sentence on whether compression pays on one network, from the judgement only."""
    place, name = units.capitalised(case.case.network_place), units.bits_name(row["bits"])
    result = f"{name} {speed_words(judged.speed)}"
    if judged.quality.word == "worse":
        return f"{place} {result}, but costs quality ({judged.quality.change})."
    if judged.word == "yes":
        return f"{place} compressing pays: {result}."
    if judged.word == "no":
        return f"{place} compressing does not pay: {result}."
    if judged.speed.word == "unclear":
        factor = units.times(judged.speed.ratio.value)
        return f"{place} the noise hides whether compressing pays ({name}: {factor})."
    if judged.quality.sound:
        return f"{place} {_sent(row, name)}{speed_words(judged.speed)} (one run)."
    return f"{place} {result}; whether it costs quality is undecided: {judged.quality.clause}."


def _sent(row: Row, name: str) -> str:
    ratio = row["compression_ratio"]
    return f"{name} " if ratio is None else f"{name} sent {units.fewer(ratio)} bytes and "
