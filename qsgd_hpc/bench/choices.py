"""All choices for one size, predicted and measured, and the quality of the plan: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from qsgd_hpc.bench.words import size_text, time_text

__all__ = ["LEGEND", "Choice", "Verdict", "choice_json", "header", "judge", "lines"]

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
