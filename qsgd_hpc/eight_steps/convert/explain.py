"""The output of `qsgd-hpc convert --explain`, and the list of open decisions."""

from __future__ import annotations

import textwrap

from qsgd_hpc.eight_steps.convert.conversion import Conversion
from qsgd_hpc.eight_steps.convert.plan import TODO
from qsgd_hpc.eight_steps.lines import lines as split
from qsgd_hpc.eight_steps.steps import STEPS

__all__ = ["explanation", "to_decide"]


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)


def explanation(done: Conversion) -> str:
    """Return the reason for each step, and the actions with their lines in the serial script."""
    parts = [
        f"{done.path}: a script of {done.framework.value}. Line numbers refer to the serial script."
    ]
    for step in STEPS:
        notes = [note for note in done.notes if note.step == step.number]
        parts += ["", f"Step {step.number}: {step.name}", _wrapped(step.why, "  ")]
        texts: dict[str, list[int]] = {}
        for note in notes:
            texts.setdefault(note.text, []).append(note.line)
        for text, lines in texts.items():
            where = ", ".join(str(line) for line in sorted(set(lines)))
            parts.append(_wrapped(f"line {where}: {text}", "  "))
        if not notes:
            parts.append("  No change in this script.")
    return "\n".join(parts)


def to_decide(done: Conversion, name: str) -> str:
    """Return the list of open decisions, with the lines of the new script.

    Args:
        done: the conversion.
        name: name of the new script.
    """
    lines = ["To decide:"]
    for number, line in enumerate(split(done.after), start=1):
        _, marked, begin = line.partition(TODO)
        notes = [n for n in done.to_decide if marked and n.text.startswith(begin.strip())]
        lines += [f"  {name}:{number}: {note.text}" for note in notes[:1]]
    return "\n".join(lines)
