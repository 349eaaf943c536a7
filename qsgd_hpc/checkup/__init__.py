"""The checks of ``qsgd-hpc doctor``: each is a function that returns findings."""

from __future__ import annotations

from qsgd_hpc.checkup.finding import Finding, Level
from qsgd_hpc.checkup.table import CHECKS, examine

__all__ = ["CHECKS", "Finding", "Level", "examine"]
