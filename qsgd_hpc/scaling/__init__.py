"""Scaling studies: plan, jobs, raw records, analysis, report.

A training script takes part with one line (``from qsgd_hpc.scaling import record``), so importing
this package stays cheap: pandas and matplotlib are loaded by the analysis alone.
"""

from qsgd_hpc.scaling._record import record

__all__ = ["record"]
