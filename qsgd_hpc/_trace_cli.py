"""``qsgd-hpc timeline``: merge the timelines of several ranks, and sum one up in a table."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from qsgd_hpc import _trace

__all__ = ["timeline"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def timeline() -> None:
    """Merge and read timelines, which QSGD_TIMELINE or start_timeline() wrote.

    \b
    Open a file at https://ui.perfetto.dev to look at it.
    """


@timeline.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.",
)  # fmt: skip
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Write the events of several ranks' FILES as one."""
    events = _trace.merge(files, output)
    click.echo(f"{output}: {events} events of {len(files)} files")


@timeline.command()
@click.argument("file", type=_FILE)
@click.option("--top", default=20, show_default=True, help="Tensors to list, the busiest first.")
def show(file: Path, top: int) -> None:
    """Print which tensors of FILE took how long, and what training waited for."""
    summary = _trace.summarise(_trace.load(file))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(_table(summary, top))
    console.print(_totals(summary), highlight=False)


def _table(summary: _trace.Summary, top: int) -> Table:
    table = Table("tensor", box=None, pad_edge=False)
    for heading in ("count", "elements", "bits", "MB sent", "negotiate ms", "queue ms", "work ms",
                    "exposed"):  # fmt: skip
        table.add_column(heading, justify="right")
    by_work = sorted(summary.tensors.items(), key=lambda item: -item[1].working_us)
    for name, t in by_work[:top]:
        table.add_row(
            name, str(t.operations), str(t.elements), f"{t.bits:.4g}", f"{t.wire_bytes / 1e6:.3f}",
            f"{t.negotiating_us / 1e3:.2f}", f"{t.queued_us / 1e3:.2f}",
            f"{t.working_us / 1e3:.2f}", _percent(t.exposed_us, t.working_us),
        )  # fmt: skip
    return table


def _totals(summary: _trace.Summary) -> str:
    time_us = summary.span_us * max(summary.ranks, 1)
    sent = sum(t.wire_bytes for t in summary.tensors.values())
    return (
        f"{len(summary.tensors)} tensors, {summary.ranks} rank(s), {summary.span_us / 1e6:.3f} s, "
        f"{sent / 1e6:.3f} MB sent: engines in collectives {_percent(summary.busy_us, time_us)} "
        f"of the time, programs waiting {_percent(summary.waiting_us, time_us)}"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "-"
