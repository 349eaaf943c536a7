"""A scheduler's answers about its machine: queues, nodes, limits."""

from __future__ import annotations

import importlib
from typing import cast

from qsgd_hpc.jobs.sites.live.facts import Live, LiveQueue

__all__ = ["ASKED", "Live", "LiveQueue", "look"]

# The schedulers that can be queried, and a command of each that exists where it is installed.
ASKED = {"pbs": "qstat", "slurm": "scontrol"}


def look(scheduler: str) -> Live:
    """Query a scheduler of :data:`ASKED` about its machine.

    Raises:
        LaunchError: it does not answer, or its answer cannot be parsed.
    """
    return cast(Live, importlib.import_module(f"{__name__}.{scheduler}").look())
