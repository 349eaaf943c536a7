"""``bench allreduce --explain``: the plan for each size, and its quality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from qsgd_hpc.bench.contestants import ours, title
from qsgd_hpc.bench.table import Timing
from qsgd_hpc.bench.words import AUTO, FLOAT_BYTES, PLAIN_BITS, size_text, time_text

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Coding, Machine
    from qsgd_hpc.bench.allreduce import Bench

__all__ = [
    "Choice",
    "Verdict",
    "by_prediction",
    "by_trial",
    "coding_of",
    "judge",
    "open_codes",
    "plan",
    "spec_of",
]

FAR = 3.0
"""Choices predicted slower than the fastest by more than this factor are not measured."""
COLUMNS = (("size", 8), ("code", 8), ("algorithm", 18), ("predicted", 9), ("measured", 9))
ERROR_WIDTH = 6
LEGEND = (
    "predicted: the planner's estimate from measurements of the machine",
    "error: measured / predicted - 1; planned: the planner's choice among these rows",
)


@dataclass(frozen=True)
class Choice:
    """One way to reduce one size."""

    code: str
    """Such as "fp32" or "4 bit"."""
    algorithm: str
    predicted_s: float
    measured_s: float | None = None
    """Median; None if it was not tried, because its prediction was much slower."""
    planned: bool = False


@dataclass(frozen=True)
class Verdict:
    """The quality of the plan at one size."""

    planned: Choice
    fastest: Choice
    """The fastest of the measured choices."""

    @property
    def miss(self) -> float:
        """Extra time of the plan relative to the fastest choice; 0 if it is the fastest."""
        assert self.planned.measured_s is not None
        assert self.fastest.measured_s is not None
        return self.planned.measured_s / self.fastest.measured_s - 1


def judge(choices: Sequence[Choice]) -> Verdict:
    """Compare the plan with the fastest choice; the plan must have been measured."""
    tried = [choice for choice in choices if choice.measured_s is not None]
    (planned,) = [choice for choice in tried if choice.planned]
    return Verdict(planned, min(tried, key=lambda choice: choice.measured_s or 0.0))


def header() -> Text:
    """Return the names of the columns."""
    names = [f"{name:>{width}}" for name, width in COLUMNS]
    names[1:3] = [f"{name:<{width}}" for name, width in COLUMNS[1:3]]
    return Text("  ".join([*names, f"{'error':>{ERROR_WIDTH}}"]), style="bold")


def lines(size_bytes: int, choices: Sequence[Choice]) -> list[Text]:
    """Return the rows of one size, the fastest first, untried ones last."""
    verdict = judge(choices)
    ordered = sorted(choices, key=lambda c: (c.measured_s is None, c.measured_s or c.predicted_s))
    found = [
        _line(size_text(size_bytes) if number == 0 else "", choice, verdict)
        for number, choice in enumerate(ordered)
    ]
    return [*found, Text(f"{'':>10}{_sentence(verdict)}", style="italic"), Text()]


def _line(size: str, choice: Choice, verdict: Verdict) -> Text:
    measured = "-" if choice.measured_s is None else time_text(choice.measured_s)
    error = choice.measured_s and f"{choice.measured_s / choice.predicted_s - 1:+.0%}"
    mark = "  planned" if choice is verdict.planned else ""
    cells = (
        f"{size:>8}  {choice.code:<8}  {choice.algorithm:<18}  "
        f"{time_text(choice.predicted_s):>9}  {measured:>9}  {error or '-':>{ERROR_WIDTH}}{mark}"
    )
    return Text(cells, style="green" if mark else "dim" if choice.measured_s is None else "")


def _sentence(verdict: Verdict) -> str:
    planned = f"{verdict.planned.code} by {verdict.planned.algorithm}"
    if verdict.planned is verdict.fastest:
        return f"planned: {planned}, which is the fastest"
    fastest = f"{verdict.fastest.code} by {verdict.fastest.algorithm}"
    return f"planned: {planned}, {verdict.miss:.1%} behind the fastest, {fastest}"


def choice_json(size_bytes: int, choice: Choice) -> dict[str, Any]:
    """Return a choice in its JSON form; times in seconds."""
    return {"size_bytes": size_bytes, **asdict(choice)}


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
    bench.say(header())
    for size_bytes in bench.request.sizes:
        tried = _try_out(bench, size_bytes // FLOAT_BYTES)
        for row in lines(size_bytes, tried):
            bench.say(row)
        found += [choice_json(size_bytes, choice) for choice in tried]
    for text in LEGEND:
        bench.say(Text(text, style="dim"))
    return found


def _ways(bench: Bench, count: int) -> list[tuple[CodecSpec | None, Choice]]:
    """Return all choices of the planner for a number of elements, each with its code."""
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
            found.append((spec, choice))
    return found


def _try_out(bench: Bench, count: int) -> list[Choice]:
    """Return the choices of a size with their measured times; collective."""
    ways = _ways(bench, count)
    longest_s = FAR * min(choice.predicted_s for _, choice in ways)
    tried = [way for way in ways if way[1].planned or way[1].predicted_s <= longest_s]
    contestants = [ours(bench.communicator, spec, choice.algorithm) for spec, choice in tried]
    bench.time(contestants, count)
    measured = [
        replace(choice, measured_s=Timing.of(contestant.seconds).median_s)
        for (_, choice), contestant in zip(tried, contestants, strict=True)
    ]
    return measured + [way[1] for way in ways if way not in tried]
