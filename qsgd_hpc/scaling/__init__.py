"""Scaling studies: plan, jobs, raw records, analysis, report.

A training script takes part with ``from qsgd_hpc.scaling import Meter`` (or ``record``), so
importing this package stays cheap: no framework, no engine; pandas and matplotlib are loaded by the
analysis alone.
"""

from qsgd_hpc.frameworks.meter import Meter
from qsgd_hpc.recording.records import record

__all__ = ["Meter", "record"]
