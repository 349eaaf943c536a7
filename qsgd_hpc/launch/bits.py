"""``--bits`` of ``run`` and ``submit``."""

from __future__ import annotations

from typing import Any

import click

from qsgd_hpc.launch.options import CHOICES_OF_BITS, is_choice_of_bits
from qsgd_hpc.rules import AUTO_BITS

__all__ = ["HELP", "WEIGHT_BITS", "WEIGHT_HELP", "Bits"]

WEIGHT_BITS = click.IntRange(2, 8)
WEIGHT_HELP = "Bits per element of the weights that FSDP2 gathers: 2 to 8. Default: uncompressed."
HELP = "Bits per gradient element: 1 to 8; 32: off; auto: 8, 4 or off, whichever is fastest here."


class Bits(click.ParamType[Any]):
    """A value of QSGD_BITS."""

    name = "bits"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Return the number, or "auto"."""
        bits = value if value == AUTO_BITS or not str(value).isdecimal() else int(value)
        if not is_choice_of_bits(bits):
            self.fail(f"{value}: {CHOICES_OF_BITS}", param, ctx)
        return bits  # type: ignore[no-any-return]
