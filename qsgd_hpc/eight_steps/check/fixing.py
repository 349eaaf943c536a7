"""Application of --fix: edit the script and check it again until nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qsgd_hpc.eight_steps import lines
from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.check.edits import apply
from qsgd_hpc.eight_steps.check.finding import Finding, Severity
from qsgd_hpc.eight_steps.reading import Script, parse
from qsgd_hpc.errors import UsageError

__all__ = ["Fixed", "diff", "examine", "fix"]

ROUNDS = 50  # overlapping edits are applied in successive rounds, and an edit may require another


@dataclass(frozen=True)
class Fixed:
    """A script after --fix: its text, the remaining findings, and the number of fixed ones."""

    script: Script
    left: tuple[Finding, ...]
    count: int


def examine(script: Script) -> Fixed:
    """Check a script; only findings that --fix removes are fixable."""
    left = check(script)
    wanted = [each for each in left if each.fixable]
    if wanted and corrected(script, left, wanted) is None:
        useless = [each for each in wanted if corrected(script, left, [each]) is None]
        left = tuple(without_edits(each) if each in useless else each for each in left)
    return Fixed(script, left, 0)


def fix(script: Script) -> Fixed:
    """Apply all safe edits; fixing the result again changes nothing."""
    left, count = check(script), 0
    for _ in range(ROUNDS):
        wanted = [each for each in left if each.fixable]
        attempts = [wanted] if len(wanted) < 2 else [wanted, *([each] for each in wanted)]
        found = (corrected(script, left, several) for several in attempts)
        done = next((each for each in found if each is not None), None)
        if done is None:
            left = tuple(without_edits(each) for each in left)
            break
        script, left, count = done.script, done.left, count + done.count
    return Fixed(script, left, count)


def corrected(script: Script, left: Sequence[Finding], wanted: Sequence[Finding]) -> Fixed | None:
    """Apply the edits of some findings.

    Returns:
        The script, its findings and the number of edits; None if the result is not valid Python,
        has more errors than before, or no fewer findings of a rule that was to be corrected.
    """
    text, count = apply(script.text, [each.edits for each in wanted])
    if not count:
        return None
    try:
        changed = parse(text.encode(script.encoding), script.path)
    except UsageError:  # an edit made the text invalid
        return None
    now = check(changed)
    before, after = rules(left), rules(now)
    if errors(now) > errors(left) or any(after[r] >= before[r] for r in rules(wanted)):
        return None
    return Fixed(changed, now, count)


def without_edits(finding: Finding) -> Finding:
    return replace(finding, edits=())


def rules(findings: Sequence[Finding]) -> Counter[str]:
    """Return the number of findings of each rule."""
    return Counter(each.rule.id for each in findings)


def errors(findings: Sequence[Finding]) -> int:
    """Return the number of errors."""
    return sum(each.severity is Severity.ERROR for each in findings)


def diff(before: Script, after: Script) -> str:
    """Return the unified diff from one text of a script to the other."""
    return lines.diff(before.text, after.text, str(before.path), str(after.path))
