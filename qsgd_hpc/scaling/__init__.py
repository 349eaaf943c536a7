"""Scaling studies: plan, jobs, raw records, analysis, report.

Training scripts use ``from qsgd_hpc.scaling import Meter`` (or ``record``), so importing this
package must stay cheap: it loads no framework and no engine; only the analysis loads pandas and
matplotlib.
"""

from qsgd_hpc.frameworks.meter import Meter
from qsgd_hpc.recording.records import record

__all__ = ["Meter", "record"]
