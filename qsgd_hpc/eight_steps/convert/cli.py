"""``qsgd-hpc convert``."""

from __future__ import annotations

from pathlib import Path

import click

from qsgd_hpc.eight_steps.convert.conversion import FRAMEWORKS, Conversion
from qsgd_hpc.eight_steps.convert.conversion import convert as converted
from qsgd_hpc.eight_steps.convert.explain import explanation, to_decide
from qsgd_hpc.errors import UsageError

__all__ = ["convert"]


def _read(script: Path) -> bytes:
    try:
        return script.read_bytes()
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror or error}") from None


def _write(out: Path, done: Conversion) -> None:
    try:
        out.write_text(done.after, encoding=done.encoding, newline="")
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from None


@click.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
    help="File for the distributed script. Default: standard output.",
)  # fmt: skip
@click.option(
    "--framework", type=click.Choice(["auto", *FRAMEWORKS]), default="auto", show_default=True,
    help="Framework of the script.",
)  # fmt: skip
@click.option("--diff", is_flag=True, help="Print the changes instead of the complete script.")
@click.option("--explain", is_flag=True, help="Print what was done in each step, and why.")
def convert(script: Path, output: Path | None, framework: str, diff: bool, explain: bool) -> None:
    """Convert a serial training script to a distributed one.

    Each of the eight steps is inserted with a comment; the rest is not changed. Open decisions are
    marked "# qsgd-hpc: TODO" and listed at the end. On one rank, the new script does the same as
    the old one. Supports PyTorch, Keras, TensorFlow 1 and 2, and JAX.

    \b
    qsgd-hpc convert train.py -o train_hvd.py
    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc convert train.py --diff --explain
    """
    done = converted(_read(script), script, FRAMEWORKS.get(framework))
    if output is not None:
        _write(output, done)
    if diff:
        click.echo(done.diff(), nl=False)
    elif output is None:
        click.echo(done.after, nl=False)
    if not done.changed:
        click.echo(f"{script}: already distributed; nothing changed", err=True)
        return
    # Standard output contains the script, so text for the user goes to stderr.
    to_stderr = output is None
    if explain:
        click.echo(explanation(done), err=to_stderr)
    if output is not None:
        click.echo(f"{output}: written; try it with: qsgd-hpc run -np 2 {output}")
    if done.to_decide:
        click.echo(to_decide(done, str(output or script)), err=to_stderr)


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
