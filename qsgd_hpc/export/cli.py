"""``qsgd-hpc export``."""

from __future__ import annotations

from pathlib import Path

import click

from qsgd_hpc.export.convert import export_model

__all__ = ["export"]


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--import", "imports", multiple=True, metavar="MODULE",
    help="Module that defines custom layers; can be repeated.",
)  # fmt: skip
def export(source: Path, target: Path, imports: tuple[str, ...]) -> None:
    """Export a trained model so that it loads without qsgd-hpc.

    SOURCE is a .keras file, the folder of a SavedModel, or the prefix of a TensorFlow checkpoint.
    TARGET has the same format, without the operations and classes of this package and without
    the parts that only training needs. As a test, it is loaded in a process that cannot import
    qsgd_hpc.

    \b
    qsgd-hpc export model.keras inference.keras
    qsgd-hpc export exported/ serving/
    qsgd-hpc export checkpoints/model.ckpt-20000 inference/model.ckpt
    """
    loaded = export_model(source, target, imports)
    click.echo(f"{target}: loads without qsgd-hpc ({loaded})")


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
