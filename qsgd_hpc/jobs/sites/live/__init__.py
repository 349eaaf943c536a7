"""A scheduler's answers about its machine: queues, nodes, limits."""

from __future__ import annotations

import importlib
from typing import cast

from qsgd_hpc.jobs.sites.live.facts import Live, LiveQueue

__all__ = ["ASKED", "Live", "LiveQueue", "look"]

# The command whose presence tells that a scheduler can be asked.
ASKED = {"pbs": "qstat", "slurm": "scontrol"}


def look(scheduler: str) -> Live:
    """Ask a scheduler of :data:`ASKED` about its machine.

    Raises:
        LaunchError: it does not answer, or not as this package understands it.
    """
    return cast(Live, importlib.import_module(f"{__name__}.{scheduler}").look())
