"""What a study found, in words: pure, and no gain is claimed that its noise could explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.analyse import Analysis
from qsgd_hpc.scaling.plan import PLAIN_BITS
from qsgd_hpc.scaling.study import Study

__all__ = ["Findings", "Tile", "findings"]

Row = Mapping[str, Any]

# One run has no interval: nearer than this to fp32 it is called the same speed.
ONE_RUN_MARGIN = 0.05
# Efficiency that exceeds 1 by more than this is questioned.
ABOVE_IDEAL = 0.1
# The loss of test accuracy (0..1) that is still called as accurate as fp32.
ACCURACY_MARGIN = 0.003


@dataclass(frozen=True)
class Tile:
    """One number of the stats strip: a label, the value, its unit, and what it refers to."""

    label: str
    value: str
    unit: str
    detail: str


@dataclass(frozen=True)
class Findings:
    """The report's words: a headline, the sentence under it, the strip, and what to mind."""

    headline: str
    lead: str
    tiles: tuple[Tile, ...]
    cautions: tuple[str, ...]


def findings(study: Study, analysis: Analysis, *, one_machine: bool) -> Findings:
    """Say what the table shows at the largest size.

    Args:
        study: the definition.
        analysis: its table.
        one_machine: every rank ran on one host, so "nodes" are groups of ranks there.
    """
    rows = analysis.rows()
    largest = [r for r in rows if r["ranks"] == rows[-1]["ranks"]]
    plain = next((r for r in largest if r["bits"] == PLAIN_BITS), None)
    packed = spokesman(largest)
    return Findings(
        headline=_headline(largest, plain, packed, analysis),
        lead=_lead(study, rows, largest, plain, packed),
        tiles=_tiles(largest, plain, packed, analysis),
        cautions=_cautions(rows, analysis, one_machine=one_machine),
    )


def spokesman(largest: Sequence[Row]) -> Row | None:
    """Return the compressed row that the headline speaks of.

    The fewest bits that cost neither speed against the fastest compressed row nor more than
    ACCURACY_MARGIN against fp32; if all cost accuracy, the most accurate one.
    """
    packed = sorted((r for r in largest if r["bits"] != PLAIN_BITS), key=lambda r: r["bits"])
    if not packed:
        return None
    plain = next((r for r in largest if r["bits"] == PLAIN_BITS), None)
    sound = [r for r in packed if (_accuracy_gap(plain, r) or 0.0) > -ACCURACY_MARGIN]
    if not sound:
        return max(packed, key=lambda r: r["test_accuracy"])
    fastest = max(sound, key=lambda r: r["images_per_s"])
    return next(r for r in sound if r is fastest or compare_speed(r, fastest) != "slower")


def compare_speed(row: Row, plain: Row) -> str:
    """Return 'faster', 'slower' or 'same': no verdict where the repeats' ranges overlap."""
    if min(row["repeats"], plain["repeats"]) > 1:
        if row["images_per_s_min"] > plain["images_per_s_max"]:
            return "faster"
        return "slower" if row["images_per_s_max"] < plain["images_per_s_min"] else "same"
    ratio = row["images_per_s"] / plain["images_per_s"]
    if abs(ratio - 1) < ONE_RUN_MARGIN:
        return "same"
    return "faster" if ratio > 1 else "slower"


def _headline(
    largest: Sequence[Row], plain: Row | None, packed: Row | None, analysis: Analysis
) -> str:
    where = words.nodes_name(largest[0]["nodes"])
    once = " (one run)" if any(r["repeats"] == 1 for r in largest) else ""
    if plain is not None and packed is not None:
        ratio = packed["images_per_s"] / plain["images_per_s"]
        verdict = {
            "faster": f"trains {words.times(ratio)} as fast as fp32",
            "slower": f"trains at {words.times(ratio)} the speed of fp32",
            "same": "trains as fast as fp32",
        }[compare_speed(packed, plain)]
        name = f"{packed['bits']}-bit QSGD"
        fewer = packed["compression_ratio"]
        if fewer is None:
            return f"On {where}, {name} {verdict}{once}"
        joint = "but" if compare_speed(packed, plain) == "slower" else "and"
        return f"On {where}, {name} sends {words.times(fewer)} fewer bytes {joint} {verdict}{once}"
    best = max(largest, key=lambda r: r["images_per_s"])
    name = words.bits_name(best["bits"])
    if best["ranks"] == analysis.reference[0]:
        return f"{where.capitalize()} trains at {words.speed(best['images_per_s'])} images/s{once}"
    return (
        f"With {name}, {where} train {words.times(best['speedup'])} as fast as "
        f"{_reference_name(analysis)}, {words.percent(best['efficiency'])} of ideal{once}"
    )


def _lead(
    study: Study, rows: Sequence[Row], largest: Sequence[Row], plain: Row | None, packed: Row | None
) -> str:
    shown = [r for r in (plain, packed) if r is not None]
    sentences = []
    if rows[0]["ranks"] != largest[0]["ranks"]:
        growth = ", ".join(
            f"{words.bits_name(r['bits'])} {words.times(r['speedup'])} "
            f"({words.percent(r['efficiency'])} of ideal)"
            for r in shown
        )
        sentences.append(
            f"Speed-up from {rows[0]['ranks']} to {largest[0]['ranks']} ranks: {growth}"
        )
    if all(r["test_accuracy"] is not None for r in shown):
        reached = ", ".join(
            f"{words.accuracy(r['test_accuracy'])} with {words.bits_name(r['bits'])}" for r in shown
        )
        sentences.append(f"Test accuracy: {reached}")
    sentences.append(
        f"The global batch stays at {study.batch_size} images"
        if study.mode == "strong"
        else f"Each rank keeps its batch of {study.batch_size} images"
    )
    return ". ".join(sentences) + "."


def _accuracy_gap(plain: Row | None, packed: Row | None) -> float | None:
    if plain is None or packed is None:
        return None
    if plain["test_accuracy"] is None or packed["test_accuracy"] is None:
        return None
    return float(packed["test_accuracy"] - plain["test_accuracy"])


def _tiles(
    largest: Sequence[Row], plain: Row | None, packed: Row | None, analysis: Analysis
) -> tuple[Tile, ...]:
    shown = packed if packed is not None else largest[0]
    name = words.bits_name(shown["bits"])
    tiles = [
        Tile(
            "Throughput",
            words.speed(shown["images_per_s"]),
            "images/s",
            f"{words.nodes_name(shown['nodes'])}, {name}",
        ),
        Tile(
            "Efficiency",
            words.percent(shown["efficiency"]),
            "of ideal",
            f"{name}, {words.times(shown['speedup'])} over {_reference_name(analysis)}",
        ),
    ]
    if shown["wire_bytes_per_step"]:
        value, unit = words.bytes_short(shown["wire_bytes_per_step"]).split()
        ratio = shown["compression_ratio"]
        against = packed is not None and ratio is not None
        fewer = f", {words.times(ratio)} fewer than fp32" if against else ""
        tiles.append(Tile("On the wire", value, f"{unit} per step", f"{name}{fewer}"))
    if shown["test_accuracy"] is not None:
        gap = _accuracy_gap(plain, packed)
        against_plain = "" if gap is None else f", {words.points(gap)} from fp32"
        percent = words.accuracy(shown["test_accuracy"])
        tiles.append(Tile("Test accuracy", percent, "", f"{name}{against_plain}"))
    return tuple(tiles)


def _reference_name(analysis: Analysis) -> str:
    ranks, bits = analysis.reference
    unit = "rank" if ranks == 1 else "ranks"
    return f"{ranks} {unit}" if bits == PLAIN_BITS else f"{ranks} {unit} at {bits} bit"


def _cautions(rows: Sequence[Row], analysis: Analysis, *, one_machine: bool) -> tuple[str, ...]:
    cautions = []
    fewest = min(r["repeats"] for r in rows)
    if fewest == 1:
        cautions.append(
            "Noise: At least one size was measured once, so it has no interval. Differences of "
            "a few per cent in images/s, and of a few tenths of a point in accuracy, may be "
            "chance. Three or more repeats show the spread."
        )
    else:
        wide = max(rows, key=_spread)
        cautions.append(
            f"Noise: Values are medians of {fewest} or more repeats with the smallest and largest "
            f"in brackets. The widest range is {words.percent(_spread(wide))} of its median "
            f"({words.nodes_name(wide['nodes'])}, {words.bits_name(wide['bits'])}). Where two "
            "ranges overlap no difference is claimed. Smallest and largest are not a confidence "
            "interval."
        )
    above = [r for r in rows if r["efficiency"] > 1 + ABOVE_IDEAL]
    if above:
        most = max(above, key=lambda r: r["efficiency"])
        cautions.append(
            f"Above ideal: {words.nodes_name(most['nodes'])} with {words.bits_name(most['bits'])} "
            f"reach {words.percent(most['efficiency'])} of ideal. Caches can give a little of "
            "that; more often the reference was slowed by other work on the machine. Measure "
            "again on a quiet one before quoting it."
        )
    if one_machine:
        cautions.append(
            "One machine: All ranks ran on one host, so its “nodes” are groups of ranks that "
            "share cores and memory bandwidth, and bytes travel through memory, not a network. "
            "Less than ideal speed-up is expected, and fewer bytes gain less than they would "
            "between real nodes."
        )
    if analysis.dataset is not None and "digits" in analysis.dataset:
        cautions.append(
            "Data: Accuracy is that of the small built-in digits set, not of MNIST; it holds a few "
            "hundred test images, so one image is a few tenths of a point."
        )
    return tuple(cautions)


def _spread(row: Row) -> float:
    return float((row["images_per_s_max"] - row["images_per_s_min"]) / row["images_per_s"])
