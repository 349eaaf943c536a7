"""A prediction as a table, Markdown, JSON and a plot; each is labelled as a prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.predict.agreement import FRAME_S, STAR, TENSOR_S
from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.inputs import TrainingProfile
from qsgd_hpc.scaling.predict.model import Prediction, Setting
from qsgd_hpc.scaling.store import writing
from qsgd_hpc.scaling.units import bits_name, speed

__all__ = ["LABEL", "Result", "as_json", "as_lines", "assumptions", "write_folder"]

LABEL = "PREDICTION, not a measurement"

LIMITS = (
    "The latency of a message is constant: small gradients on many ranks may take longer.",
    "Network cards reach their line rate; protocol headers and other jobs are ignored.",
    "Ranks differ by independent normal noise; slow nodes and busy file systems are ignored.",
    "Input, evaluation and checkpoints take as long as in the measurement, on any number of nodes.",
    "SimGrid divides the bandwidth of links as fluids, without packets or congestion control.",
)


def assumptions(
    training: TrainingProfile,
    fabric: Fabric,
    setting: Setting,
    bits: Sequence[int],
    unconfirmed: Sequence[str] = (),
    routing: str = "adaptive",
) -> list[str]:
    """Return the assumptions of a prediction, one sentence each."""
    found = [
        f"Computing: {training.name}, {training.compute_s * 1e3:.4g} ms per step of "
        f"{training.batch:g} {training.unit} per rank ({training.source}).",
    ]
    if setting.speedup != 1:
        found.append(
            f"Computing is {setting.speedup:g} times as fast as measured: given with "
            "--gpu-speedup, not measured."
        )
    if setting.mode == "strong":
        found.append("The computing time of a rank is proportional to its share of the batch.")
    found += [_sentence(text) for text in (*training.assumptions, *fabric.assumptions)]
    found += [_sentence(text) for b in bits if (text := training.coding_of(b)[1])]
    if unconfirmed:
        found.append(f"Not confirmed in the site profile: {', '.join(unconfirmed)}.")
    if setting.ranks_per_node > 1 and not training.buckets:
        found.append(
            "Ranks of a node reduce through its memory, as the core does, at "
            f"{fabric.memory_bandwidth / 1e9:g} GB/s for all of them."
        )
    if fabric.host_bandwidth and not training.staged:
        found.append(
            "Gradients are copied from GPU to memory and back at "
            f"{fabric.host_bandwidth / 1e9:g} GB/s, without overlap."
        )
    if fabric.shape is not None:
        found.append(
            "The job has as few groups or leaf switches as possible, shared with no other job; "
            f"{routing} routing."
        )
    if not training.buckets:
        found.append(
            f"Ranks agree on what is ready along a tree, up to {STAR} ranks along a star: sending "
            f"a message takes {FRAME_S * 1e6:g} us, reading one {FRAME_S * 1e6:g} us and "
            f"{TENSOR_S * 1e6:g} us per gradient in it. A rank that waits for slower ones sleeps."
        )
    return found


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


COLUMNS = (
    *("nodes", "ranks", "bits", "step ms", "{unit}/s", "efficiency"),
    *("compute ms", "wait ms", "exposed ms", "comm ms", "agree ms"),
)


@dataclass(frozen=True)
class Result:
    """All predictions of one command.

    Attributes:
        title: the training and the machine.
        unit: what throughput counts.
        rows: predictions by the closed form.
        simulated: the same rows by SimGrid; empty if not requested.
        assumptions: sentences.
        notes: other remarks, such as why SimGrid was not used.
    """

    title: str
    unit: str
    rows: tuple[Prediction, ...]
    simulated: tuple[Prediction, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def pairs(self) -> list[tuple[Prediction, Prediction | None]]:
        """Return each row with SimGrid's row, or with None."""
        return [
            (row, self.simulated[i] if self.simulated else None) for i, row in enumerate(self.rows)
        ]

    def remarks(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the headings that have sentences, each with its sentences."""
        found = [
            ("Assumptions", self.assumptions),
            ("Limits of the model", LIMITS),
            ("Notes", self.notes),
        ]
        return [(head, sentences) for head, sentences in found if sentences]


def _cells(result: Result) -> tuple[list[str], list[list[str]]]:
    heads = [name.format(unit=result.unit) for name in COLUMNS]
    if result.simulated:
        heads += ["SimGrid: step ms", "efficiency", "exposed ms"]
    body = []
    for row, other in result.pairs():
        cells = [
            str(row.nodes),
            str(row.ranks),
            bits_name(row.bits),
            f"{row.step_s * 1e3:.4g}",
            speed(row.throughput),
            f"{row.efficiency:.1%}",
            f"{row.compute_s * 1e3:.4g}",
            f"{row.straggler_s * 1e3:.3g}",
            f"{row.exposed_s * 1e3:.3g}",
            f"{row.comm_s * 1e3:.3g}",
            f"{row.agree_s * 1e3:.3g}",
        ]
        if other:
            cells += [
                f"{other.step_s * 1e3:.4g}",
                f"{other.efficiency:.1%}",
                f"{other.exposed_s * 1e3:.3g}",
            ]
        body.append(cells)
    return heads, body


def as_lines(result: Result) -> list[str]:
    """Return the lines for a terminal; the columns of the closed form come first."""
    heads, body = _cells(result)
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    rows = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for cells in (heads, *body)
    ]
    return [f"{LABEL}: {result.title}", "", *rows]


def as_json(result: Result) -> dict[str, Any]:
    """Return the complete result as JSON values."""
    return {
        "label": LABEL,
        "title": result.title,
        "unit": result.unit,
        "rows": [asdict(row) for row in (*result.rows, *result.simulated)],
        "assumptions": list(result.assumptions),
        "limits": list(LIMITS),
        "notes": list(result.notes),
    }


def as_markdown(result: Result) -> str:
    """Return the table, its assumptions and the limits of the model."""
    heads, body = _cells(result)
    lines = [f"# {LABEL}: {result.title}", "", "| " + " | ".join(heads) + " |"]
    lines.append("|" + "---:|" * len(heads))
    lines += ["| " + " | ".join(cells) + " |" for cells in body]
    for head, sentences in result.remarks():
        lines += ["", f"## {head}", "", *(f"- {sentence}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


def write_folder(result: Result, folder: Path) -> list[Path]:
    """Write prediction.md, prediction.png and prediction.json; return their paths.

    Raises:
        UsageError: the folder cannot be written.
    """
    paths = [folder / f"prediction.{end}" for end in ("md", "png", "json")]
    with writing("folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(as_markdown(result), encoding="utf-8")
        _plot(result, paths[1])
        paths[2].write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
    return paths


def _plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, (pace, share) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    bits = sorted({row.bits for row in result.rows}, reverse=True)
    for number, each in enumerate(bits):
        for rows, style, by in (
            (result.rows, "--", "closed form"),
            (result.simulated, "-", "SimGrid"),
        ):
            chosen = [row for row in rows if row.bits == each]
            if not chosen:
                continue
            ranks = [row.ranks for row in chosen]
            label = f"{bits_name(each)}, {by}"
            look = {"linestyle": style, "color": f"C{number}", "marker": ".", "label": label}
            pace.plot(ranks, [row.throughput for row in chosen], **look)
            share.plot(ranks, [row.efficiency for row in chosen], **look)
    for axes in (pace, share):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    pace.set_yscale("log", base=2)
    pace.set_ylabel(f"{result.unit}/s")
    share.set_ylabel("efficiency")
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    # Above 1 on fewer ranks than were measured, if waiting for data does not grow with the batch.
    share.set_ylim(0, 1.05 * max(1.0, *(row.efficiency for row in result.rows + result.simulated)))
    share.legend(fontsize=8)
    figure.suptitle(f"{LABEL}: {result.title}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
