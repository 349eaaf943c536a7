"""The plan of a conversion: edits, the purpose of each, and open decisions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.lines import margin
from qsgd_hpc.eight_steps.reading import Script
from qsgd_hpc.eight_steps.steps import step

__all__ = ["HEADER", "TODO", "WIDTH", "Edit", "Note", "Plan", "apply"]


@dataclass(frozen=True)
class Edit:
    """Replace text[start:end] by `text`; with start == end, insert it.

    Attributes:
        order: order of several insertions at one place, smaller ones first.
    """

    start: int
    end: int
    text: str
    order: int = 0


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits made; all other text keeps its bytes.

    Insertions inside of a replaced part are dropped; replaced parts must not overlap.
    """
    parts, position = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end > e.start, e.order)):
        if edit.start < position and edit.start == edit.end:
            continue
        assert edit.start >= position, f"edits overlap at {edit.start}: {edit.text!r}"
        parts += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, text[position:]])


TODO = "# qsgd-hpc: TODO"
WIDTH = 96
# The order of insertions at one place: lines before a statement, text around expressions (ordered
# by length), a further argument, lines after the statement.
BEFORE, HEADER, INDENT, ARGUMENT, AFTER = -3 * 10**9, -2 * 10**9, -(10**9), 10**8, 10**9


@dataclass(frozen=True, order=True)
class Note:
    """An action, or an open decision, at a line of the script.

    Attributes:
        line: counted from 1.
        step: 1 to 8, or 0 for an open decision.
        text: one sentence.
    """

    line: int
    step: int
    text: str


class Plan:
    """Collects the edits of one conversion; nodes are those of the script, lines count from 1."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self.arrays: set[str] = set()
        """Names of arrays that contain only a rank's shard."""
        self.parts: set[tuple[cst.CSTNode, str]] = set()
        """The scope and the name of each of them."""
        self.sharded: set[cst.Call] = set()
        """Calls whose data set, or number of batches, is divided among the ranks already."""
        self.alike = False
        """Whether ranks must draw equal numbers in training, too: they split shuffled data."""
        self.needs_module_level_init = False
        self.imports: list[str] = []
        """Further imports that edits need."""
        self.opening: list[str] = []
        """Further lines right after the initialisation."""
        self._commented: set[str] = set()
        self._newline = script.module.default_newline

    # ---- places

    def offset(self, place: tuple[int, int]) -> int:
        """Return the offset of a line and column in the text."""
        return self.script.offset(place)

    def anchor(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the statement before or after which lines for a node can be inserted."""
        found = self.script.statement(node)
        parent = self.script.parents.get(found)
        while isinstance(parent, cst.If) and parent.orelse is found:  # an elif
            found, parent = parent, self.script.parents.get(parent)
        return found

    def indentation(self, statement: cst.BaseStatement) -> str:
        """Return the white space before a statement."""
        return self.script.indentation(statement)

    def line_indentation(self, line: int) -> str:
        """Return the white space at the beginning of a line."""
        text = self.script.lines[line - 1]
        return text[margin(text) : len(text) - len(text.lstrip())]

    @property
    def newline(self) -> str:
        """Return the line end of the script."""
        return self._newline

    def touch(self, node: cst.CSTNode) -> None:
        """Ensure that init() has been called where a node runs."""
        around = set(self.script.ancestors(node))
        inside = any(isinstance(n, cst.FunctionDef) for n in around)
        entry = self.script.entry
        if not inside and not (isinstance(entry, cst.If) and entry in around):
            self.needs_module_level_init = True

    # ---- edits

    def before(self, node: cst.CSTNode, *lines: str) -> None:
        """Insert lines before the statement of a node, indented like it."""
        self.touch(node)
        statement = self.anchor(node)
        first: cst.CSTNode = statement
        if isinstance(statement, cst.FunctionDef | cst.ClassDef) and statement.decorators:
            first = statement.decorators[0]
        start = self.offset((self.script.line(first), 0))
        indent = self.indentation(statement)
        text = "".join(
            f"{indent}{line}{self._newline}" if line else self._newline for line in lines
        )
        self.edits.append(Edit(start, start, text, BEFORE))

    def after(self, node: cst.CSTNode, *lines: str) -> None:
        """Insert lines after the statement of a node, indented like it."""
        self.touch(node)
        statement = self.anchor(node)
        indent = self.indentation(statement)
        last, _ = self.script.end(statement)
        place = self.offset((last, len(self.script.lines[last - 1])))
        text = "".join(
            f"{self._newline}{indent}{line}" if line else self._newline for line in lines
        )
        # Lines after an inner loop precede lines after an outer loop that ends with it.
        self.edits.append(Edit(place, place, text, AFTER - len(indent)))

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the offsets of an expression with the parentheses around it."""
        start, end = self.offset(self.script.start(node)), self.offset(self.script.end(node))
        start -= sum(len(self.script.code(each)) for each in getattr(node, "lpar", ()))
        end += sum(len(self.script.code(each)) for each in getattr(node, "rpar", ()))
        return start, end

    def wrap(self, node: cst.CSTNode, prefix: str, suffix: str) -> None:
        """Insert text immediately before and after an expression."""
        self.touch(node)
        start, end = self.span(node)
        # Outer expressions enclose the text around inner ones: prefix first, suffix last.
        self.edits += [Edit(start, start, prefix, start - end), Edit(end, end, suffix, end - start)]

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace an expression."""
        self.touch(node)
        start, end = self.span(node)
        self.edits.append(Edit(start, end, text))

    def insert(self, place: int, text: str, *, last: bool = False) -> None:
        """Insert text at an offset, before or after the other insertions there."""
        self.edits.append(Edit(place, place, text, ARGUMENT if last else BEFORE))

    def add_argument(self, call: cst.Call, text: str) -> None:
        """Add a last argument to a call."""
        self.touch(call)
        if not call.args:
            end = self.offset(self.script.end(call)) - 1
            self.edits.append(Edit(end, end, text))
            return
        _, end = self.span(call.args[-1].value)
        self.edits.append(Edit(end, end, f", {text}", ARGUMENT))

    def under(self, statements: Sequence[cst.BaseStatement], header: str, *lines: str) -> None:
        """Put neighbouring statements under a header, with lines before it."""
        first, last = statements[0], statements[-1]
        self.touch(first)
        indent = self.indentation(first)
        top, bottom = self.script.line(first), self.script.end(last)[0]
        texts = [f"{indent}{line}{self._newline}" for line in (*lines, header)]
        start = self.offset((top, 0))
        self.edits.append(Edit(start, start, "".join(texts), HEADER))
        kept = self._inside_strings()
        for line in range(top, bottom + 1):
            text = self.script.lines[line - 1]
            start = self.offset((line, margin(text)))
            if line not in kept and text.strip():
                self.edits.append(Edit(start, start, self.script.module.default_indent, INDENT))

    def _inside_strings(self) -> set[int]:
        """Return the lines that begin inside of a string."""
        lines: set[int] = set()
        for node in self.script.nodes:
            if isinstance(node, cst.SimpleString | cst.FormattedString):
                lines |= set(range(self.script.line(node) + 1, self.script.end(node)[0] + 1))
        return lines

    # ---- words

    def comment(self, number: int, text: str, at: cst.CSTNode, *, once: bool = False) -> list[str]:
        """Record a note on a step and return its comment; with `once`, empty if it is repeated."""
        self.notes.append(Note(self.script.line(at), number, text))
        if once and text in self._commented:
            return []
        self._commented.add(text)
        return self._wrapped(f"# Step {number}: {step(number).name}. {text}", at)

    def todo(self, at: cst.CSTNode, text: str) -> None:
        """Leave a decision to the author: a comment before the statement, and a note."""
        note = Note(self.script.line(at), 0, text)
        if note not in self.notes:
            self.notes.append(note)
            self.before(at, *self._wrapped(f"{TODO} {text}", at))

    def _wrapped(self, comment: str, at: cst.CSTNode) -> list[str]:
        """Return a comment in lines that fit the width at its indentation."""
        width = WIDTH - len(self.indentation(self.anchor(at)))
        return textwrap.wrap(comment, max(width, 40), subsequent_indent="# ")
