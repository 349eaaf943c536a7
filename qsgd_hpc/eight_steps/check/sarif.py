"""Findings as SARIF 2.1.0, which code hosts and editors show next to the code.

Source: OASIS, Static Analysis Results Interchange Format version 2.1.0, sections 3.13 to 3.27.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qsgd_hpc import __version__
from qsgd_hpc.eight_steps.check.finding import RULES, Edit, Finding, Rule

__all__ = ["sarif"]

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(found: Iterable[tuple[Path, Finding]]) -> dict[str, Any]:
    """Return a SARIF log with one run."""
    driver = {
        "name": "qsgd-hpc check",
        "version": __version__,
        "rules": [described(each) for each in RULES],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [result(path, each) for path, each in found],
            }
        ],
    }


def described(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "help": {"text": rule.remedy},
        "defaultConfiguration": {"level": rule.severity.value},
    }


def result(path: Path, finding: Finding) -> dict[str, Any]:
    artifact = {"uri": quote(path.as_posix())}
    region = {"startLine": finding.line, "startColumn": finding.column}
    found: dict[str, Any] = {
        "ruleId": finding.rule.id,
        "ruleIndex": RULES.index(finding.rule),
        "level": finding.severity.value,
        "message": {"text": f"{finding.rule.title}: {finding.reason}. {finding.remedy}"},
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
    }
    if finding.fixable:
        changes = [replacement(each) for each in finding.edits]
        found["fixes"] = [
            {
                "description": {"text": finding.remedy},
                "artifactChanges": [{"artifactLocation": artifact, "replacements": changes}],
            }
        ]
    return found


def replacement(edit: Edit) -> dict[str, Any]:
    (line, column), (end_line, end_column) = edit.start, edit.end
    return {
        "deletedRegion": {
            "startLine": line,
            "startColumn": column + 1,
            "endLine": end_line,
            "endColumn": end_column + 1,
        },
        "insertedContent": {"text": edit.text},
    }
