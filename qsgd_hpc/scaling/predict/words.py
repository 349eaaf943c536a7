"""What every prediction says beside its numbers: that it is one, what it assumes, where it errs."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.model import FRAME_S, Setting
from qsgd_hpc.scaling.predict.training import TrainingProfile

__all__ = ["LABEL", "LIMITS", "assumptions"]

LABEL = "PREDICTION, not a measurement"

LIMITS = (
    "Messages cost a fixed time beside their bytes: small gradients on many ranks may take longer.",
    "Network cards run at their line rate; protocol headers and other jobs take their part of it.",
    "Ranks differ by independent normal noise; a slow node or a busy file system is not in it.",
    "Input, evaluation and checkpoints take what they took in the measurement, on any number of "
    "nodes.",
    "SimGrid shares links as fluids: it knows neither packets nor congestion control.",
)


def assumptions(
    training: TrainingProfile,
    fabric: Fabric,
    setting: Setting,
    bits: Sequence[int],
    unconfirmed: Sequence[str] = (),
    routing: str = "adaptive",
) -> list[str]:
    """Return what a prediction takes for granted, a sentence each."""
    found = [
        f"Computing: {training.name}, {training.compute_s * 1e3:.4g} ms a step of "
        f"{training.batch:g} {training.unit} a rank ({training.source}).",
    ]
    if setting.speedup != 1:
        found.append(
            f"Computing is {setting.speedup:g} times as fast as measured: given with "
            "--gpu-speedup, not measured."
        )
    if setting.mode == "strong":
        found.append("Computing takes as long as a rank's share of the batch is large.")
    found += [_sentence(text) for text in (*training.assumptions, *fabric.assumptions)]
    found += [_sentence(text) for b in bits if (text := training.coding_of(b)[1])]
    if unconfirmed:
        found.append(f"Not confirmed in the site profile: {', '.join(unconfirmed)}.")
    if setting.ranks_per_node > 1:
        found.append(
            "Ranks of a node reduce through its memory, as the core does, at "
            f"{fabric.memory_bandwidth / 1e9:g} GB/s for all of them."
        )
    if fabric.host_bandwidth and not training.staged:
        found.append(
            "Gradients are copied from GPU to memory and back at "
            f"{fabric.host_bandwidth / 1e9:g} GB/s, beside nothing else."
        )
    if fabric.shape is not None:
        found.append(
            f"The job has as few groups or leaf switches as hold it, for itself; {routing} routing."
        )
    found.append(
        f"To agree on what is ready, rank 0 spends {FRAME_S * 1e6:g} us on each other rank."
    )
    return found


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
