"""``qsgd-hpc convert``."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import click
import libcst as cst

from qsgd_hpc.eight_steps.check import Severity, check
from qsgd_hpc.eight_steps.convert import FRAMEWORKS, Conversion, words
from qsgd_hpc.eight_steps.convert import convert as converted
from qsgd_hpc.eight_steps.convert.plan import TODO, WIDTH, Plan, apply
from qsgd_hpc.eight_steps.reading import parse, source
from qsgd_hpc.eight_steps.tree import lines as split
from qsgd_hpc.errors import UsageError

__all__ = ["convert", "to_decide"]


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
    done = _marked(converted(source(script), script, FRAMEWORKS.get(framework)))
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
        click.echo(_explanation(done), err=to_stderr)
    if output is not None:
        click.echo(f"{output}: written; try it with: qsgd-hpc run -np 2 {output}")
    if listed := to_decide(done, str(output or script)):
        click.echo(listed, err=to_stderr)


def _marked(done: Conversion) -> Conversion:
    """Mark where ranks would leave a loop by a value of their own, which ends in a deadlock."""
    if not done.changed:
        return done
    script = parse(done.after, done.path)
    plan = Plan(script)
    found = {each.line: each for each in check(script) if each.rule.id == "QH802"}
    for node in script.nodes:
        if isinstance(node, cst.BaseStatement) and (each := found.get(script.line(node))):
            plan.todo(node, f"{each.reason}. {each.remedy}")
    return replace(done, after=apply(done.after, plan.edits))


def _indented(text: str) -> str:
    return textwrap.indent(textwrap.fill(text, WIDTH - 2), "  ")


def _explanation(done: Conversion) -> str:
    """Return the reason for each step, and the actions with their lines in the serial script."""
    parts = [
        f"{done.path}: a script of {done.framework.value}. Line numbers refer to the serial script."
    ]
    for step in words.STEPS:
        notes = [note for note in done.notes if note.step == step.number]
        parts += ["", f"Step {step.number}: {step.name}", _indented(step.why)]
        texts: dict[str, list[int]] = {}
        for note in notes:
            texts.setdefault(note.text, []).append(note.line)
        for text, lines in texts.items():
            where = ", ".join(str(line) for line in sorted(set(lines)))
            parts.append(_indented(f"line {where}: {text}"))
        if not notes:
            parts.append("  No change in this script.")
    return "\n".join(parts)


def to_decide(done: Conversion, name: str) -> str:
    """Return the list of open decisions, with the lines of the new script; empty if there are none.

    After those of the conversion, the list has what `qsgd-hpc check` warns of in the new script.

    Args:
        done: the conversion.
        name: name of the new script.
    """
    lines = []
    below: dict[int, str] = {}  # the TODO above a line, of which the check may warn, too
    after = split(done.after)
    for number, line in enumerate(after, start=1):
        _, mark, begin = line.partition(TODO)
        notes = [n for n in done.to_decide if mark and n.text.startswith(begin.strip())]
        lines += [f"  {name}:{number}: {note.text}" for note in notes[:1]]
        if notes:
            code = (i for i, each in enumerate(after) if i >= number and each.lstrip()[:1] != "#")
            at = next(code) + 1
            below[at] = f"{below.get(at, '')} {notes[0].text}"
    for found in check(parse(done.after, done.path)):
        marked = {"QH504": (words.CLIP_IT,), "QH301": (" shard ", "sampler=")}
        above = below.get(found.line, "")
        twice = any(each in above for each in marked.get(found.rule.id, ()))
        if found.severity is not Severity.NOTE and not twice:
            lines.append(f"  {name}:{found.line}: {found.reason}. {found.remedy}")
    return "\n".join(["To decide:", *lines] if lines else [])


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
