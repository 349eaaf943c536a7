"""``qsgd-hpc check``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from qsgd_hpc import __version__
from qsgd_hpc.eight_steps.check import RULES, Edit, Finding, Fixed, Rule, Severity, examine, fix
from qsgd_hpc.eight_steps.check.helpers import helpers
from qsgd_hpc.eight_steps.reading import Script, distributed_without_hvd, read
from qsgd_hpc.eight_steps.tree import diff
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.words import counted, listing

__all__ = ["check_command"]


@click.command("check")
@click.argument("scripts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--fix", "correct", is_flag=True, help="Apply the safe corrections.")
@click.option("--diff", "show", is_flag=True, help="Print what --fix would change, or has changed.")
@click.option("--json", "json_", is_flag=True, help="Print JSON, for programs.")
@click.option("--sarif", "sarif_", is_flag=True, help="Print SARIF 2.1.0, for code hosts.")
def check_command(
    scripts: tuple[Path, ...], correct: bool, show: bool, json_: bool, sarif_: bool
) -> None:
    """Check distributed training scripts, for Horovod or this package, for the eight steps.

    The scripts are neither imported nor run. Each finding has a position, a rule, a reason and a
    remedy. A comment `# qsgd-hpc: ignore[QH301]` suppresses it. Exit code 0: no errors or warnings
    (notes are possible); 1: errors or warnings; 2: a file cannot be read, or is not a distributed
    script.

    \b
    qsgd-hpc check train.py
    qsgd-hpc check --diff train.py       # show what --fix would do
    qsgd-hpc check --sarif *.py > findings.sarif
    """
    if (json_ and sarif_) or (show and (json_ or sarif_)):
        raise UsageError("choose one of --json, --sarif and --diff.")
    read_ones = [read(path) for path in dict.fromkeys(scripts)]
    serial = [each for each in read_ones if not is_distributed(each)]
    known = [each for each in read_ones if each not in serial]
    results = [fix(each) if correct or show else examine(each) for each in known]
    if correct:
        for before, after in zip(known, results, strict=True):
            write(before, after.script)
    if show:
        for before, after in zip(known, results, strict=True):
            name = str(before.path)
            click.echo(diff(before.text, after.script.text, name, name), nl=False)
        if not correct:
            results = [examine(each) for each in known]
    report(results, json_, sarif_, bool(show and not correct))
    if serial:
        raise UsageError("\n".join(serial_text(each) for each in serial))
    left = [each for result in results for each in result.left]
    sys.exit(1 if any(each.severity is not Severity.NOTE for each in left) else 0)


def is_distributed(script: Script) -> bool:
    """Return whether a script, or a local module that it imports, is distributed."""
    return bool(script.distributed or helpers(script).names)


def write(before: Script, after: Script) -> None:
    """Write a script back, in the encoding it had."""
    if after.text == before.text:
        return
    try:
        before.path.write_bytes(after.text.encode(before.encoding))
    except OSError as error:
        raise UsageError(f"{before.path}: {error.strerror or error}") from None


def report(results: list[Fixed], json_: bool, sarif_: bool, to_stderr: bool) -> None:
    found: list[tuple[Path, Finding]] = [(r.script.path, f) for r in results for f in r.left]
    fixed = sum(each.count for each in results)
    if json_:
        click.echo(json.dumps(as_json(found, len(results), fixed), indent=2))
    elif sarif_:
        click.echo(json.dumps(as_sarif(found), indent=2))
    else:
        for path, each in found:
            for line in lines(path, each):
                click.echo(line, err=to_stderr)
        if results:
            click.echo(summary(found, len(results), fixed), err=to_stderr)


def serial_text(script: Script) -> str:
    """Return the message for a script without hvd."""
    if (fault := distributed_without_hvd(script)) is not None:
        return f"{script.path}: not examined, because it is {fault}"
    return (
        f"{script.path}: not a distributed script: it imports neither horovod nor a framework's "
        f"module of qsgd_hpc. Convert it with: qsgd-hpc convert {script.path}"
    )


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


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def as_sarif(found: Found) -> dict[str, Any]:
    """Return findings as SARIF 2.1.0, which code hosts and editors show next to the code.

    Source: OASIS, Static Analysis Results Interchange Format version 2.1.0, sections 3.13 to 3.27.
    """
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


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
