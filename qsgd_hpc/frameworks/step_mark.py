"""Marks of steps for a study of a single rank, whose gradients bypass the engine."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc import env
from qsgd_hpc.recording import STEP_MARK
from qsgd_hpc.runtime import basics

__all__ = ["leave_to_meter", "mark_name", "marks_steps", "smallest"]

_metered = False


def leave_to_meter() -> None:
    """Stop marking steps in programs compiled from now on, because a Meter times them."""
    global _metered
    _metered = True


def marks_steps() -> bool:
    """Return whether one gradient per step must go through the engine, to mark the step.

    It is an uncompressed sum over one rank, which does not change the training.
    """
    return not _metered and env.get("QSGD_RECORDS") is not None and basics.size() == 1


def mark_name(name: str) -> str:
    """Return the marking operation's name, given its name in a job of several ranks."""
    return STEP_MARK + name


def smallest(sizes: Sequence[int | None]) -> int:
    """Return the index of the smallest gradient; None is an unknown size and counts as largest."""
    return min(range(len(sizes)), key=lambda i: (sizes[i] is None, sizes[i] or 0))
