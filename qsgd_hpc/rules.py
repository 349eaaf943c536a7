"""Rules that set the bits of individual tensors: ``*.bias=32, embed*=8, >1M=2``.

A rule consists of a pattern and bits per element: 1 to 8, or 32 (``"fp32"``) for no compression. A
pattern is a glob for the tensor's name, or ``>COUNT`` or ``<COUNT`` elements, with the suffixes k,
M and G for thousands, millions and billions. The first rule that matches is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qsgd_hpc.errors import UsageError

__all__ = ["AUTO_BITS", "PLAIN_BITS", "Rule", "as_rules", "first_match", "parse_rules"]

PLAIN_BITS = 32
"""The value of bits that means uncompressed float32."""
AUTO_BITS = "auto"
"""The value of bits that lets the planner choose."""

_BITS = (*range(1, 9), PLAIN_BITS)
_SIZE = re.compile(r"([<>])\s*([0-9]*\.?[0-9]+)\s*([kKMG]?)")
_UNITS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_REMEDY = "expected PATTERN=BITS with 1 to 8, 32 or fp32, such as '*.bias=32, embed*=8, >1M=2'"


@dataclass(frozen=True)
class Rule:
    """A pattern, and the bits per element of tensors that match it; 32 is uncompressed."""

    pattern: str
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _BITS or not self.pattern:
            raise UsageError(f"rule {self.pattern!r}={self.bits!r}: {_REMEDY}")
        if self.pattern[0] in "<>" and not _SIZE.fullmatch(self.pattern):
            raise UsageError(
                f"rule {self.pattern!r}: a size is > or < and a number of elements, such as >1M"
            )

    def fits(self, name: str, count: int) -> bool:
        """Return whether the pattern matches a tensor of this name and number of elements."""
        size = _SIZE.fullmatch(self.pattern)
        if size is None:
            return fnmatchcase(name, self.pattern)
        limit = float(size[2]) * _UNITS[size[3]]
        return count > limit if size[1] == ">" else count < limit


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parse ``PATTERN=BITS, PATTERN=BITS``, the format of QSGD_RULES.

    Raises:
        UsageError: an entry is not a rule; the message quotes it.
    """
    rules = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, value = entry.rpartition("=")
        bits = _bits(value.strip())
        if not pattern.strip() or bits not in _BITS:
            raise UsageError(f"rule {entry!r}: {_REMEDY}")
        rules.append(Rule(pattern.strip(), bits))
    return tuple(rules)


def as_rules(rules: str | Iterable[Rule | tuple[str, int | str]]) -> tuple[Rule, ...]:
    """Return rules from text, from pairs of pattern and bits, or from rules.

    Raises:
        UsageError: an entry is not a rule.
    """
    if isinstance(rules, str):
        return parse_rules(rules)
    found = []
    for entry in rules:
        if isinstance(entry, Rule):
            found.append(entry)
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
            found.append(Rule(entry[0], _bits(entry[1])))
        else:
            raise UsageError(f"rule {entry!r}: expected a pair such as ('embed*', 8)")
    return tuple(found)


def first_match(rules: Iterable[Rule], name: str, count: int) -> int | None:
    """Return the bits of the first rule that matches, or None."""
    return next((rule.bits for rule in rules if rule.fits(name, count)), None)


def _bits(value: int | str) -> int:
    if isinstance(value, int):
        return value
    if value.lower() == "fp32":
        return PLAIN_BITS
    return int(value) if value.isdecimal() else 0  # which is rejected
