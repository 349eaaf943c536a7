"""Comments that suppress findings: `# qsgd-hpc: ignore[QH301, QH401]`, or `ignore` for all."""

from __future__ import annotations

import re

from qsgd_hpc.eight_steps.check.finding import Finding
from qsgd_hpc.eight_steps.reading import Script

__all__ = ["is_ignored"]

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
