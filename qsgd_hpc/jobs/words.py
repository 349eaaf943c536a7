"""Small pure helpers: similar names, durations, numbers and lists as text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from qsgd_hpc.errors import UsageError

__all__ = ["clock", "counted", "did_you_mean", "listing", "minutes", "plural"]

_UNITS_MIN = {"s": 1 / 60, "m": 1.0, "h": 60.0, "d": 1440.0}
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_NUMBER = r"\d+(?:\.\d+)?"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``Did you mean 'x'?`` for a similar valid name, else the list of valid names."""
    names = list(valid)
    lowered = {n.lower(): n for n in reversed(names)}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.55)
    if near:
        return f"Did you mean '{lowered[near[0]]}'?"
    return f"Valid: {', '.join(names)}." if names else "There are none."


def minutes(text: str, *, plain: str = "m") -> float:
    """Return the minutes of a time such as 30m, 90s, 2h, 1h30m, 1:00:00.

    Args:
        text: the user's text.
        plain: unit of a number without one: s, m, h or d.

    Raises:
        UsageError: the text is not a time, or is zero.
    """
    value = _minutes(text.strip().lower(), plain)
    if value is None or value <= 0:
        raise UsageError(
            f"{text!r} is not a time. Write 30m, 90s, 2h, 1h30m or 1:00:00 (H:MM:SS); "
            f"a plain number is {_UNITS[plain]}."
        )
    return value


def _minutes(text: str, plain: str) -> float | None:
    if match := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text):
        hours, mins, seconds = (int(part) for part in match.groups())
        return hours * 60 + mins + seconds / 60
    text = f"{text}{plain}" if re.fullmatch(_NUMBER, text) else text
    parts = re.findall(rf"({_NUMBER})([smhd])", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNITS_MIN[unit] for number, unit in parts)
    return None


def clock(walltime_min: float) -> str:
    """Return HH:MM:SS, rounded up to a second, as every scheduler reads it."""
    seconds = -int(-round(walltime_min * 60, 3) // 1)
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def listing(names: Iterable[str], last: str = "or") -> str:
    """Join names as a sentence does: ``a, b or c``."""
    words = list(names)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def plural(number: int, noun: str) -> str:
    """Return ``1 job``, ``2 jobs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def counted(number: int, noun: str) -> str:
    """Return ``one job``, ``two jobs``, ``20 jobs``."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    count = words[number] if 0 <= number < len(words) else str(number)
    return f"{count} {noun}{'' if number == 1 else 's'}"
