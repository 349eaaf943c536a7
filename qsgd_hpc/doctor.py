"""The command ``qsgd-hpc doctor``: report faults of the installation, and their remedies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import click

from qsgd_hpc.checkup import Finding, Level, examine
from qsgd_hpc.jobs.words import counted, listing

__all__ = ["doctor"]

_COLOURS = {Level.OK: "green", Level.NOTE: "yellow", Level.FAULT: "red"}
TOPIC_WIDTH = 15


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(as_json: bool) -> None:
    """Check this installation: Python, core, MPI, frameworks, site, job folder, memory, GPUs.

    Changes nothing and imports no framework. Exit code 1: there is a fault.
    """
    found = examine()
    if as_json:
        click.echo(json.dumps([finding.as_json() for finding in found], indent=2))
    else:
        for finding in found:
            _print(finding)
        click.echo(_summary(found))
    sys.exit(1 if any(finding.level is Level.FAULT for finding in found) else 0)


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.value:<6}", fg=_COLOURS[finding.level])
    first, *more = finding.text.splitlines() or [""]
    click.echo(f"{level}{finding.topic:<{TOPIC_WIDTH}}{first}")
    indent = " " * (6 + TOPIC_WIDTH)
    for line in [*more, *([f"-> {finding.remedy}"] if finding.remedy else [])]:
        click.echo(f"{indent}{line}")


def _summary(found: Iterable[Finding]) -> str:
    levels = [finding.level for finding in found]
    return listing(
        (
            f"{levels.count(Level.OK)} ok",
            counted(levels.count(Level.NOTE), "note"),
            counted(levels.count(Level.FAULT), "fault"),
        ),
        "and",
    )


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
