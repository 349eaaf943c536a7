"""What --fix does: edits applied, and the script checked again, until none is left."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.check.edits import apply
from qsgd_hpc.eight_steps.check.finding import Finding
from qsgd_hpc.eight_steps.reading import Script, parse
from qsgd_hpc.errors import UsageError

__all__ = ["Fixed", "diff", "fix"]

ROUNDS = 10  # edits that meet are applied one after the other, and an edit may call for another


@dataclass(frozen=True)
class Fixed:
    """A script after --fix: its text, what is still to be done, and how many findings went."""

    script: Script
    left: tuple[Finding, ...]
    count: int


def fix(script: Script) -> Fixed:
    """Apply all edits that are safe; the result is the same when it is fixed again."""
    left = check(script)
    count = 0
    for _ in range(ROUNDS):
        groups = [each.edits for each in left if each.fixable]
        text, applied = apply(script.text, groups)
        if not applied:
            break
        try:
            changed = parse(text.encode(script.module.encoding), script.path)
        except UsageError:  # an edit that this text does not bear: better none
            break
        now = check(changed)
        if severity(now) > severity(left):
            break
        script, left, count = changed, now, count + applied
    return Fixed(script, left, count)


def severity(findings: tuple[Finding, ...]) -> int:
    """Return how many errors there are."""
    return sum(each.severity.value == "error" for each in findings)


def diff(before: Script, after: Script) -> str:
    """Return the unified diff from one text of a script to the other."""
    lines = difflib.unified_diff(
        before.text.splitlines(keepends=True),
        after.text.splitlines(keepends=True),
        str(before.path),
        str(after.path),
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end\n" for line in lines
    )
