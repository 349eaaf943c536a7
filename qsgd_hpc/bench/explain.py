"""``bench allreduce --explain``: the plan for each size, and its quality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from qsgd_hpc.bench import choices
from qsgd_hpc.bench.choices import Choice
from qsgd_hpc.bench.contestants import ours, title
from qsgd_hpc.bench.rounds import Data, Effort, time_all
from qsgd_hpc.bench.samples import Timing
from qsgd_hpc.bench.words import AUTO, PLAIN_BITS, size_text

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Coding, Machine
    from qsgd_hpc.bench.allreduce import Bench

__all__ = ["by_prediction", "by_trial", "coding_of", "open_codes", "plan", "spec_of"]

FLOAT_BYTES = 4
FAR = 3.0
"""Choices predicted slower than the fastest by more than this factor are not measured."""


def coding_of(bits: int, scheme: str, *, lasting: bool = True) -> Coding:
    """Return the coding for a number of bits, with bucket and norm from the environment.

    Args:
        bits: 1 to 8.
        scheme: a code with a choice of bits.
        lasting: as in training, with error feedback if training uses it; else each call separately.
    """
    from qsgd_hpc.compression import KINDS

    return KINDS[scheme](bits).coding(lasting=lasting)  # type: ignore[call-arg]


def spec_of(bits: int, scheme: str) -> CodecSpec:
    """Return the code of a separate call."""
    return coding_of(bits, scheme, lasting=False).spec


def open_codes() -> list[CodecSpec]:
    """Return the codes between which ``Compression.auto()`` chooses."""
    from qsgd_hpc import _core

    return _core.open_codes(spec_of(8, "qsgd"), any_code=True)


def plan(machine: Machine, count: int, codecs: Sequence[CodecSpec]) -> Any:
    """Return the plan for a message with one tensor, in one of these codes or as float32."""
    from qsgd_hpc import _core

    return _core.plan(machine, count=count, codecs=codecs, any_algorithm=True)


def by_prediction(bench: Bench) -> list[dict[str, Any]]:
    """Print the plan of each size and number of bits, not measured; return them in JSON form."""
    plans = []
    for size_bytes in bench.request.sizes:
        for codecs in _alternatives(bench):
            found = plan(bench.machine, size_bytes // FLOAT_BYTES, codecs)
            bench.say(f"{size_text(size_bytes):>8}  {found.algorithm:18}  {found.reason}")
            plans.append(
                {
                    "size_bytes": size_bytes,
                    "code": title(found.spec),
                    "algorithm": found.algorithm,
                    "predicted_s": found.seconds,
                    "reason": found.reason,
                }
            )
    return plans


def _alternatives(bench: Bench) -> Iterator[list[CodecSpec]]:
    """Yield the codes of each plan: all open ones for auto, else each separately."""
    for bits in bench.request.bits:
        codecs = bench.codecs(bits)
        yield from [codecs] if bits in (AUTO, PLAIN_BITS) else [[spec] for spec in codecs]


def by_trial(bench: Bench) -> list[dict[str, Any]]:
    """Print every choice of each size, predicted and measured; return them in JSON form."""
    found: list[dict[str, Any]] = []
    bench.say()
    bench.say(choices.header())
    for size_bytes in bench.request.sizes:
        tried = _try_out(bench, size_bytes // FLOAT_BYTES)
        for line in choices.lines(size_bytes, tried):
            bench.say(line)
        found += [choices.choice_json(size_bytes, choice) for choice in tried]
    for text in choices.LEGEND:
        bench.say(Text(text, style="dim"))
    return found


@dataclass(frozen=True)
class _Way:
    spec: CodecSpec | None
    choice: Choice


def _ways(bench: Bench, count: int) -> list[_Way]:
    """Return all choices of the planner for a number of elements."""
    from qsgd_hpc import _core

    machine, bits = bench.machine, bench.request.bits
    planned = plan(machine, count, [spec for b in bits for spec in bench.codecs(b)])
    asked: list[CodecSpec | None] = []
    for b in bits:
        plain = [None] if b in (AUTO, PLAIN_BITS) else []
        asked += [spec for spec in (*plain, *bench.codecs(b)) if spec not in asked]
    if planned.spec not in asked:  # the planner may decline all codes
        asked.insert(0, planned.spec)
    found = []
    for spec in asked:
        for name in machine.known(compressed=spec is not None):
            choice = Choice(
                code=title(spec),
                algorithm=name,
                predicted_s=_core.allreduce_s(machine, algorithm=name, count=count, coding=spec),
                planned=(name, spec) == (planned.algorithm, planned.spec),
            )
            found.append(_Way(spec, choice))
    return found


def _try_out(bench: Bench, count: int) -> list[Choice]:
    """Return the choices of a size with their measured times; collective."""
    ways = _ways(bench, count)
    longest_s = FAR * min(way.choice.predicted_s for way in ways)
    tried = [w for w in ways if w.choice.planned or w.choice.predicted_s <= longest_s]
    contestants = [ours(bench.communicator, w.spec, w.choice.algorithm) for w in tried]
    effort = Effort(bench.request.rounds, bench.request.seconds)
    time_all(contestants, Data(bench.comm, bench.mpi, count), bench.comm, bench.mpi, effort)
    measured = [
        replace(way.choice, measured_s=Timing.of(contestant.seconds).median_s)
        for way, contestant in zip(tried, contestants, strict=True)
    ]
    return measured + [way.choice for way in ways if way not in tried]
