"""Check a distributed training script for the eight steps, and fix it.

::

    findings = check(read(Path("train.py")))
    fixed = fix(read(Path("train.py")))

Each finding has a rule with a stable id, a position, a reason, a remedy and, if that is safe, the
edits that fix it. Only the text is analysed: nothing is imported or run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qsgd_hpc.eight_steps.check import (
    broadcast,
    data,
    deadlock,
    keras3,
    metrics,
    optimizer,
    saving,
    start,
)
from qsgd_hpc.eight_steps.check.facts import facts
from qsgd_hpc.eight_steps.check.finding import RULES, Edit, Finding, Rule, Severity, apply
from qsgd_hpc.eight_steps.reading import Script, parse
from qsgd_hpc.errors import UsageError

__all__ = ["RULES", "Edit", "Finding", "Fixed", "Rule", "Severity", "check", "examine", "fix"]

PARTS = (start, data, optimizer, broadcast, saving, metrics, deadlock, keras3)


def check(script: Script) -> tuple[Finding, ...]:
    """Return the findings, in the order of the text.

    Comments `# qsgd-hpc: ignore[QH301]` on a line or above it suppress its findings. The modules
    next to the script are read, too: a step that one of them performs is not missing.
    """
    known = facts(script)
    found = {each: None for part in PARTS for each in part.check(known)}
    kept = (each for each in found if not is_ignored(script, each))
    return tuple(sorted(kept, key=lambda f: (f.line, f.column, f.rule.id)))


COMMENT = re.compile(r"#\s*qsgd-hpc:\s*ignore(?:\[([^\]]*)\])?", re.IGNORECASE)


def is_ignored(script: Script, finding: Finding) -> bool:
    """Return whether a comment suppresses a finding.

    The comment is on the finding's line, or alone on the line above it.
    """
    if silences(script.comments.get(finding.line, ""), finding):
        return True
    above = finding.line - 1
    alone = above >= 1 and script.lines[above - 1].lstrip().startswith("#")
    return alone and silences(script.comments.get(above, ""), finding)


def silences(comment: str, finding: Finding) -> bool:
    found = COMMENT.search(comment)
    if found is None:
        return False
    ids = found[1]
    return ids is None or finding.rule.id in re.split(r"[\s,]+", ids.strip().upper())


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
