"""Findings as lines for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from qsgd_hpc.eight_steps.check.finding import Finding, Severity
from qsgd_hpc.jobs.words import counted, listing

__all__ = ["as_json", "lines", "summary"]

Found = Sequence[tuple[Path, Finding]]
COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def lines(path: Path, finding: Finding) -> list[str]:
    """Return the text of a finding: position, rule and reason, then the remedy."""
    level = click.style(finding.severity.value, fg=COLOURS[finding.severity])
    place = f"{path}:{finding.line}:{finding.column}"
    mark = " [--fix]" if finding.fixable else ""
    return [
        f"{place}: {level} {finding.rule.id} {finding.rule.title}: {finding.reason}",
        f"    {finding.remedy}{mark}",
    ]


def summary(found: Found, scripts: int, fixed: int = 0) -> str:
    """Return the last line, with the counts."""
    done = f"{counted(fixed, 'finding')} fixed; " if fixed else ""
    where = counted(scripts, "script")
    if not found:
        return f"{done}{where}: nothing {'else ' if fixed else ''}to report"
    levels = [each.severity for _, each in found]
    kinds = [counted(levels.count(s), s.value) for s in Severity if s in levels]
    fixable = sum(each.fixable for _, each in found)
    can = f"; --fix corrects {fixable}" if fixable else ""
    return f"{done}{where}: {listing(kinds, 'and')}{can}"


def as_json(found: Found, scripts: int, fixed: int) -> dict[str, Any]:
    """Return findings as JSON values; `schema` is increased when a key changes its meaning."""
    return {
        "schema": 1,
        "scripts": scripts,
        "fixed": fixed,
        "findings": [row(path, each) for path, each in found],
    }


def row(path: Path, finding: Finding) -> dict[str, Any]:
    return {
        "path": str(path),
        "line": finding.line,
        "column": finding.column,
        "rule": finding.rule.id,
        "step": finding.rule.step,
        "severity": finding.severity.value,
        "title": finding.rule.title,
        "reason": finding.reason,
        "remedy": finding.remedy,
        "fixable": finding.fixable,
    }
