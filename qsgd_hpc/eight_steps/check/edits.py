"""Edits that do not change the text around them, and their application."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.check.finding import Edit
from qsgd_hpc.eight_steps.lines import margin, starts
from qsgd_hpc.eight_steps.reading import Script

__all__ = ["add_argument", "apply", "behind", "guard", "insert_after", "insert_before", "replace"]


def replace(script: Script, node: cst.CSTNode, text: str) -> Edit:
    """Replace a node's text."""
    return Edit(script.start(node), script.end(node), text)


def alone(script: Script, statement: cst.BaseStatement) -> bool:
    """Return whether a statement is alone on its lines, so that lines can be added around it."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) and statement.decorators:
        return False
    is_elif = isinstance(script.parents.get(statement), cst.If)
    return not is_elif and not script.indentation(statement).strip()


def insert_before(script: Script, node: cst.CSTNode, *lines: str) -> tuple[Edit, ...]:
    """Insert lines before the statement that contains a node, with the same indentation."""
    statement = script.statement(node)
    if not alone(script, statement):
        return ()
    place = (script.line(statement), 0)
    indent, end = script.indentation(statement), script.module.default_newline
    return (Edit(place, place, "".join(f"{indent}{each}{end}" for each in lines)),)


def insert_after(script: Script, node: cst.CSTNode, *lines: str) -> tuple[Edit, ...]:
    """Insert lines after the statement that contains a node, with the same indentation."""
    statement = script.statement(node)
    if not alone(script, statement):
        return ()
    line, _ = script.end(statement)
    place = (line, len(script.lines[line - 1]))
    indent, end = script.indentation(statement), script.module.default_newline
    return (Edit(place, place, "".join(f"{end}{indent}{each}" for each in lines)),)


def add_argument(script: Script, call: cst.Call, text: str) -> Edit:
    """Add an argument after the last one of a call."""
    if call.args:
        place, text = behind(script, call.args[-1]), f", {text}"
    else:
        line, column = script.end(call)
        place = (line, column - 1)
    return Edit(place, place, text)


def behind(script: Script, arg: cst.Arg) -> tuple[int, int]:
    """Return the place after the value of an argument and the parentheses around it."""
    line, column = script.end(arg.value)
    return line, column + len(getattr(arg.value, "rpar", ()))


def guard(script: Script, node: cst.CSTNode, condition: str) -> tuple[Edit, ...]:
    """Put the simple statement that contains a node under a condition."""
    statement = script.statement(node)
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return ()
    if not isinstance(statement.body[0], cst.Expr) or not alone(script, statement):
        return ()
    first, _ = script.start(statement)
    last, _ = script.end(statement)
    if any(spans_lines(script, n) for n in script.inside(statement)):
        return ()
    indent = script.indentation(statement)
    step = script.module.default_indent
    head = Edit((first, 0), (first, 0), f"{indent}if {condition}:{script.module.default_newline}")
    numbered = [(n, script.lines[n - 1]) for n in range(first, last + 1)]
    begins = [(n, margin(line)) for n, line in numbered if line.strip()]
    return (head, *(Edit(begin, begin, step) for begin in begins))


def spans_lines(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is a string over several lines, whose text an indent would change."""
    is_text = isinstance(node, (cst.SimpleString, cst.FormattedString))
    return is_text and script.end(node)[0] > script.line(node)


def apply(text: str, groups: Iterable[Sequence[Edit]]) -> tuple[str, int]:
    """Apply groups of edits; a group that overlaps an earlier one is skipped completely.

    Returns:
        The new text, and the number of applied groups.
    """
    offsets = starts(text)

    def at(place: tuple[int, int]) -> int:
        return min(offsets[place[0] - 1] + place[1], len(text))

    taken: list[tuple[int, int, int, str]] = []
    count = 0
    for group in groups:
        spans = [(at(e.start), at(e.end), e.text) for e in group]
        if not spans or any(overlap(a, b, c, d) for a, b, _ in spans for c, d, _, _ in taken):
            continue
        taken += [(a, b, len(taken) + i, new) for i, (a, b, new) in enumerate(spans)]
        count += 1
    for begin, end, _, new in sorted(taken, key=lambda t: t[:3], reverse=True):
        text = text[:begin] + new + text[end:]
    return text, count


def overlap(a: int, b: int, c: int, d: int) -> bool:
    return (a, b) == (c, d) or (a < d and c < b)
