"""Make a distributed training script of a serial one: `qsgd-hpc convert`.

A framework's rules (`torch_script`, `keras_script`, ...) read the script and put edits into a
`Plan`; what no rule can decide becomes a TODO. All that no edit touches stays as it is.
"""

from qsgd_hpc.eight_steps.convert.conversion import FRAMEWORKS, Conversion, convert
from qsgd_hpc.eight_steps.convert.plan import Note

__all__ = ["FRAMEWORKS", "Conversion", "Note", "convert"]
