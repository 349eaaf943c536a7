"""Conversion of a serial training script to a distributed one: `qsgd-hpc convert`.

A framework's rules (`torch_script`, `keras_script`, ...) read the script and add edits to a `Plan`.
Decisions that no rule can make become TODOs. Text without edits is not changed.
"""

from qsgd_hpc.eight_steps.convert.conversion import FRAMEWORKS, Conversion, convert
from qsgd_hpc.eight_steps.convert.plan import Note

__all__ = ["FRAMEWORKS", "Conversion", "Note", "convert"]
