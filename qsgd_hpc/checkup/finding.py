"""Findings of the checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

__all__ = ["Finding", "Level", "fault", "note", "ok"]


class Level(str, Enum):
    """Severity: correct, worth knowing, or a fault."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One line of the list; ``remedy`` is the action to take, empty if none is needed."""

    level: Level
    topic: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding for --json."""
        return {**asdict(self), "level": self.level.value}


def ok(topic: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, topic, text)


def note(topic: str, text: str, remedy: str = "") -> Finding:
    """Return a finding that may matter."""
    return Finding(Level.NOTE, topic, text, remedy)


def fault(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding that must be corrected."""
    return Finding(Level.FAULT, topic, text, remedy)
