"""Findings of the checker: rule, position, reason, and the edit that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Edit", "Finding", "Rule", "Severity"]


class Severity(Enum):
    """Severity of a finding; the values are SARIF's levels."""

    ERROR = "error"  # wrong results, destroyed files or a job that hangs
    WARNING = "warning"  # slower, or less accurate, than intended
    NOTE = "note"  # a matter of taste


@dataclass(frozen=True)
class Rule:
    """One rule of the checker.

    Attributes:
        id: stable; the first digit is the number of the step, 0 for changes of other software, 9
            for jobs that hang.
        severity: default severity of its findings.
        title: the fault, in a few words.
        remedy: what to do, with "hvd" for the script's own alias.
    """

    id: str
    severity: Severity
    title: str
    remedy: str

    @property
    def step(self) -> int | None:
        """The number of its step, None if it belongs to none."""
        number = int(self.id[2])
        return number if 1 <= number <= 8 else None


@dataclass(frozen=True)
class Edit:
    """A replacement of text; places are (line from 1, column from 0), the end excluded."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Finding:
    """One violation of a rule.

    Attributes:
        rule: the violated rule.
        line: from 1.
        column: from 1.
        reason: the fault at this position.
        remedy: what to do.
        severity: its severity.
        edits: the edits that fix it safely; empty if only the author can fix it.
    """

    rule: Rule
    line: int
    column: int
    reason: str
    remedy: str
    severity: Severity
    edits: tuple[Edit, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether --fix can fix it."""
        return bool(self.edits)
