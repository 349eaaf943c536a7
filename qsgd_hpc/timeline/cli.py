"""``qsgd-hpc timeline``: time by step and by tensor; merging of files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsgd_hpc.errors import UsageError
from qsgd_hpc.timeline import traces

__all__ = ["timeline"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Exceeds every table: a terminal wraps long lines, so that neither names nor numbers are cut.
_LINE = 1000


class _ShowsFiles(click.Group):
    """A group that treats unknown commands as files to show."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_ShowsFiles)
def timeline() -> None:
    """Summarise and merge timelines that QSGD_TIMELINE or start_timeline() wrote.

    \b
        qsgd-hpc timeline t.json        show the time by part of a step and by tensor

    To view a file, open it at https://ui.perfetto.dev.
    """


@timeline.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
    help="Output file.",
)  # fmt: skip
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Merge the FILES of several ranks into one."""
    events = traces.merge(files, output)
    click.echo(f"{output}: {events} events of {len(files)} files")


@timeline.command()
@click.argument("file", type=_FILE)
@click.option(
    "--top", type=click.IntRange(0), default=20, show_default=True,
    help="Number of tensors to list, by time.",
)  # fmt: skip
def show(file: Path, top: int) -> None:
    """Print the time by part of a step and by tensor of FILE.

    \b
    computing    the program did not wait for a result
    waiting for  it waited for another rank to submit a tensor
    exposed      it waited while its engine executed collectives
    agreeing     it waited while ranks negotiated the next operation
    The step is the sum of these four. In parallel to them ran
    hidden       collectives during which the program did not wait
    coding       the codec, in hidden or exposed collectives
    """
    events = traces.load(file)
    if events and not traces.ranks_of(events):
        raise UsageError(
            f"{file} is the trace of another program: none of its processes is a rank. Name a file "
            "of QSGD_TIMELINE"
        )
    summary = traces.summarise(events)
    console = Console(width=_LINE)
    if steps := traces.of_steps(events):
        console.print(_steps_title(steps), highlight=False)
        console.print(_steps_table(steps))
        console.print()
    console.print(_table(summary, top))
    console.print(_totals(summary), highlight=False)


def _steps_title(ranks: Sequence[traces.RankSteps]) -> str:
    durations = [duration for rank in ranks for duration in rank.durations_us]
    count, median_ms = len(ranks[0].durations_us), statistics.median(durations) / 1e3
    which = "one step of" if count == 1 else f"{count} steps of"
    return f"{which} {median_ms:.3g} ms{'' if count == 1 else ' (median)'}; ms of a step, mean:"


def _steps_table(ranks: Sequence[traces.RankSteps]) -> Table:
    table = Table("rank", box=None, pad_edge=False)
    for heading in ("step", "computing", "exposed", "agreeing", "waiting for", "hidden", "coding"):
        table.add_column(heading, justify="right")
    for rank in ranks:
        count = len(rank.durations_us)

        def cell(time_us: float, count: int = count, step_us: float = rank.steps_us) -> str:
            return f"{time_us / count / 1e3:.3g} ({_percent(time_us, step_us)})"

        absent = sorted(rank.absent_us.items(), key=lambda item: -item[1])
        table.add_row(
            str(rank.rank), f"{rank.steps_us / count / 1e3:.3g}", cell(rank.computing_us),
            cell(rank.exposed_us), cell(rank.agreeing_us),
            "\n".join(f"{_rank_name(r)}: {cell(us)}" for r, us in absent) or "-",
            cell(rank.hidden_us), cell(rank.coding_us),
        )  # fmt: skip
    return table


def _rank_name(rank: int) -> str:
    return "others" if rank == traces.OTHERS else f"rank {rank}"


def _table(summary: traces.Summary, top: int) -> Table:
    table = Table("tensor", box=None, pad_edge=False)
    for heading in ("count", "elements", "bits", "MB sent", "negotiate ms", "queue ms", "work ms",
                    "exposed"):  # fmt: skip
        table.add_column(heading, justify="right")
    by_work = sorted(summary.tensors.items(), key=lambda item: -item[1].working_us)
    for name, t in by_work[:top]:
        table.add_row(
            Text(name), str(t.operations), str(t.elements), f"{t.bits:.4g}",
            f"{t.wire_bytes / 1e6:.3f}",
            f"{t.negotiating_us / 1e3:.2f}", f"{t.queued_us / 1e3:.2f}",
            f"{t.working_us / 1e3:.2f}", _percent(t.exposed_us, t.working_us),
        )  # fmt: skip
    return table


def _totals(summary: traces.Summary) -> str:
    time_us = summary.span_us * max(summary.ranks, 1)
    sent = sum(t.wire_bytes for t in summary.tensors.values())
    return (
        f"{len(summary.tensors)} tensors, {summary.ranks} rank(s), {summary.span_us / 1e6:.3f} s, "
        f"{sent / 1e6:.3f} MB sent: engines in collectives {_percent(summary.busy_us, time_us)} "
        f"of the time, programs waiting {_percent(summary.waiting_us, time_us)}"
    )


def _percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f}%" if total > 0 else "-"


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
