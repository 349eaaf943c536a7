"""The codes to train with: all of this package, with and without error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from qsgd_hpc.compression import KINDS

__all__ = ["ALL", "CASTS", "FEEDBACK", "Code", "Contestant", "select"]

CASTS = {"none": None, "fp16": "float16", "bf16": "bfloat16"}
"""The core's name of each type that gradients are cast to; "none" is float32."""
FEEDBACK = ", feedback"
OTHER_SEEDS = (1, 2)
SEEDED = ("fp32", "qsgd 8 bit", "qsgd 4 bit")
"""Also trained with other seeds: the baseline, the code of least error, and the usual choice."""


@dataclass(frozen=True)
class Code:
    """One choice of ``hvd.Compression``."""

    name: str
    kind: str
    """``none``, ``fp16``, ``bf16``, or one of ``compression.KINDS``."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback can be chosen: casts have none."""
        return self.kind not in CASTS

    @property
    def scheme(self) -> str | None:
        """The core's name; None if float32 is sent."""
        return KINDS[self.kind].scheme if self.feeds_back else CASTS[self.kind]


@dataclass(frozen=True)
class Contestant:
    """One training."""

    code: Code
    error_feedback: bool | None = None
    """None if the code has no choice."""
    later: int = 0
    """Added to the seed of weights and batches, to show the effect of chance on the accuracy."""

    @property
    def name(self) -> str:
        """The name in the table and for ``--only``."""
        seed = f", seed + {self.later}" if self.later else ""
        return self.code.name + seed + (FEEDBACK if self.error_feedback else "")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of its ``hvd.Compression``."""
        feedback = {"error_feedback": self.error_feedback} if self.code.feeds_back else {}
        return {**self.code.settings, **feedback}


BITS = (8, 6, 5, 4, 3, 2)
NEAREST = {"norm": "max", "rounding": "nearest"}
CHOSEN = (
    Code("fp32", "none"),
    Code("fp16", "fp16"),
    Code("bf16", "bf16"),
    *(Code(f"qsgd {bits} bit", "qsgd", {"bits": bits, "norm": "max"}) for bits in BITS),
    Code("qsgd 4 bit l2", "qsgd", {"bits": 4, "norm": "l2"}),
    *(Code(f"qsgd {bits} bit nearest", "qsgd", {"bits": bits, **NEAREST}) for bits in (4, 2)),
    *(Code(f"eden {bits} bit", "eden", {"bits": bits}) for bits in (4, 3, 2, 1)),
    Code("sign (1 bit)", "sign"),
    Code("minmax 4 bit", "minmax", {"bits": 4}),
    Code("minmax 2 bit", "minmax", {"bits": 2}),
    Code("nuqsgd 4 bit", "nuqsgd", {"bits": 4}),
    *(Code(f"elias {bits} bit", "elias", {"bits": bits}) for bits in (5, 2)),
    Code("topk 1%", "topk", {"ratio": 0.01}),
)
CODES = (*CHOSEN, *(Code(kind, kind) for kind in KINDS if kind not in {c.kind for c in CHOSEN}))


def _trainings(code: Code) -> Iterator[Contestant]:
    choices = (False, True) if code.feeds_back else (None,)
    yield from (Contestant(code, feedback) for feedback in choices)
    if code.name in SEEDED:
        yield from (Contestant(code, choices[0], later) for later in OTHER_SEEDS)


ALL = tuple(contestant for code in CODES for contestant in _trainings(code))


def select(patterns: Iterable[str]) -> tuple[Contestant, ...]:
    """Return the contestants whose names match a pattern such as ``qsgd*``; all if none given."""
    wanted = tuple(patterns) or ("*",)
    return tuple(c for c in ALL if any(fnmatchcase(c.name, pattern) for pattern in wanted))
