"""Marks steps, so that a study can time a single rank, whose gradients bypass the engine."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc import env
from qsgd_hpc.recording.engine_record import STEP_MARK
from qsgd_hpc.runtime import basics

__all__ = ["leave_to_meter", "mark_name", "marks_steps", "smallest"]

_metered = False


def leave_to_meter() -> None:
    """Stop marking steps in programs compiled from now on, because a Meter times them."""
    global _metered
    _metered = True


def marks_steps() -> bool:
    """Return whether one gradient of each step must pass the engine, to mark the step.

    It is an uncompressed sum over one rank, which does not change the training.
    """
    return not _metered and env.get("QSGD_RECORDS") is not None and basics.size() == 1


def mark_name(name: str) -> str:
    """Return the name of the operation, by the one that it would have among several ranks."""
    return STEP_MARK + name


def smallest(sizes: Sequence[int | None]) -> int:
    """Return where the smallest gradient is; None is one whose size is not known yet."""
    return min(range(len(sizes)), key=lambda i: (sizes[i] is None, sizes[i] or 0))
