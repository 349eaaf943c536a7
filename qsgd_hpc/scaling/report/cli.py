"""``qsgd-hpc report``: writes the report of a study from its raw records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.store import StudyFolder

__all__ = ["report", "show"]


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Output folder. Default: FOLDER; with --vs: FOLDER/vs-<name of the other>.",
)
@click.option(
    "--vs",
    "other",
    type=click.Path(path_type=Path),
    help="Folder of another study to compare with, for equal cases, ranks and bits.",
)
@click.option(
    "--rows",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append one row per size to this CSV file, whose format is the same for all sites.",
)
@click.option("--system", help="Name of the machine in --rows. Default: the study's site.")
def report(
    folder: Path, output: Path | None, other: Path | None, rows: Path | None, system: str | None
) -> None:
    """Write the report of the study in FOLDER again from its raw records.

    Writes report.html, REPORT.md, results.csv, results.tex and the plots. Equal records give equal
    files, so every number can be verified.

    \b
    Compare with an earlier study:     qsgd-hpc report NOW --vs BEFORE
    Collect speeds of many machines:   qsgd-hpc report NOW --rows speeds.csv --system Polaris
    """
    from qsgd_hpc.scaling.report.terminal import console

    if system is not None and rows is None:
        raise click.UsageError("--system names the machine in --rows FILE; give both.")
    study = StudyFolder(folder)
    show(study, console(), output, other)
    if rows is not None:
        _append(rows, study, system)


def _append(target: Path, folder: StudyFolder, system: str | None) -> None:
    from qsgd_hpc.scaling.report.tables import COLUMNS, rows, to_csv
    from qsgd_hpc.scaling.store import usable

    attempts, _ = folder.attempts()
    text = to_csv(rows(usable(attempts), system or folder.study().site))
    try:
        before = target.read_text("utf-8") if target.exists() else ""
        heading = text.partition("\n")[0]
        if before and before.partition("\n")[0] != heading:
            raise UsageError(
                f"--rows {target}: its first line must be {','.join(COLUMNS)}. Use another file."
            )
        with target.open("a", encoding="utf-8") as file:
            if before and not before.endswith("\n"):  # as some editors leave it
                file.write("\n")
            file.write(text.partition("\n")[2] if before else text)
    except OSError as error:
        raise UsageError(f"--rows {target}: {error.strerror}. Name another file.") from None


def show(
    folder: StudyFolder, screen: Any, target: Path | None = None, other: Path | None = None
) -> None:
    """Write a study's report into `target`, or into its own folder, and print its result.

    Args:
        folder: the study.
        screen: a rich console.
        target: where to write; None: the study's folder, or one in it for a comparison.
        other: folder of a study to compare with.
    """
    # pandas and matplotlib are loaded here, not when the command line starts.
    from qsgd_hpc.scaling.report.report import load, write
    from qsgd_hpc.scaling.report.terminal import print_comparison, print_result

    loaded = load(folder)
    if other is None:
        print_result(screen, loaded, write(loaded, target or folder.path))
        return
    from qsgd_hpc.scaling.report.compare import compare

    names = _names(folder.path, other)
    comparison = compare(loaded, load(StudyFolder(other)), names)
    # In another folder, because the study's own report depends only on its records.
    page = write(loaded, target or folder.path / f"vs-{other.resolve().name}", comparison)
    print_comparison(screen, comparison, page)


def _names(folder: Path, other: Path) -> tuple[str, str]:
    ours, theirs = folder.resolve(), other.resolve()
    if ours.name != theirs.name:
        return ours.name, theirs.name
    return str(folder), str(other)


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
