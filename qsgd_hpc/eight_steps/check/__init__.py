"""Check a distributed training script for the eight steps.

::

    findings = check(read(Path("train.py")))

Each finding has a rule with a stable id, a position, a reason, a remedy and, if that is safe, the
edits that fix it. Only the text is analysed: nothing is imported or run.
"""

from __future__ import annotations

import re

from qsgd_hpc.eight_steps.check import (
    broadcast,
    data,
    deadlock,
    keras3,
    metrics,
    optimizer,
    saving,
    start,
    uncalled,
)
from qsgd_hpc.eight_steps.check.facts import facts
from qsgd_hpc.eight_steps.check.finding import RULES, Edit, Finding, Rule, Severity
from qsgd_hpc.eight_steps.reading import Script

__all__ = ["RULES", "Edit", "Finding", "Rule", "Severity", "check"]

PARTS = (start, uncalled, data, optimizer, broadcast, saving, metrics, deadlock, keras3)


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
