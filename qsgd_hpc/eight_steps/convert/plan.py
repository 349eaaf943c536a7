"""The plan of a conversion: edits, the purpose of each, and open decisions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.words import step
from qsgd_hpc.eight_steps.reading import Script
from qsgd_hpc.eight_steps.tree import margin

__all__ = ["ARGUMENT", "HEADER", "TODO", "WIDTH", "Edit", "Note", "Plan", "apply"]


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
        self.parts: dict[tuple[cst.CSTNode, str], tuple[int, int]] = {}
        """The scope and the name of each of them, and the place from which it is a shard."""
        self.sharded: set[cst.CSTNode] = set()
        """Calls whose data set, or number of batches, is divided among the ranks already."""
        self.written: set[cst.CSTNode] = set()
        """Callbacks that only rank 0 has already, because they write files."""
        self.removed: set[cst.CSTNode] = set()
        """Callbacks that are in another place of their list now."""
        self.alike = False
        """Whether ranks must draw equal numbers in training, too: they split shuffled data."""
        self.needs_module_level_init = False
        self.imports: list[str] = []
        """Further imports that edits need."""
        self.opening: list[str] = []
        """Further lines right after the initialisation."""
        self._commented: set[str] = set()
        self.newline = script.module.default_newline

    # ---- places

    def anchor(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the statement before or after which lines for a node can be inserted."""
        found = self.script.statement(node)
        parent = self.script.parents.get(found)
        while isinstance(parent, cst.If) and parent.orelse is found:  # an elif
            found, parent = parent, self.script.parents.get(parent)
        return found

    def line_indentation(self, line: int) -> str:
        """Return the white space at the beginning of a line."""
        text = self.script.lines[line - 1]
        return text[margin(text) : len(text) - len(text.lstrip())]

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
        start = self.script.offset((self.script.line(first), 0))
        indent = self.script.indentation(statement)
        text = "".join(f"{indent}{line}{self.newline}" if line else self.newline for line in lines)
        self.insert(start, text)

    def after(self, node: cst.CSTNode, *lines: str) -> None:
        """Insert lines after the statement of a node, indented like it."""
        self.touch(node)
        statement = self.anchor(node)
        indent = self.script.indentation(statement)
        last, _ = self.script.end(statement)
        place = self.script.offset((last, len(self.script.lines[last - 1])))
        text = "".join(f"{self.newline}{indent}{line}" if line else self.newline for line in lines)
        # Lines after an inner loop precede lines after an outer loop that ends with it.
        self.insert(place, text, AFTER - len(indent))

    def wrap(self, node: cst.CSTNode, prefix: str, suffix: str) -> None:
        """Insert text immediately before and after an expression."""
        self.touch(node)
        start, end = self.script.span(node)
        # Outer expressions enclose the text around inner ones: prefix first, suffix last.
        self.edits += [Edit(start, start, prefix, start - end), Edit(end, end, suffix, end - start)]

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace an expression."""
        self.touch(node)
        self.edits.append(Edit(*self.script.span(node), text))

    def insert(self, place: int, text: str, order: int = BEFORE) -> None:
        """Insert text at an offset, before the other insertions there unless `order` is larger."""
        self.edits.append(Edit(place, place, text, order))

    def add_argument(self, call: cst.Call, text: str) -> None:
        """Add a last argument to a call."""
        self.touch(call)
        if call.args:
            self.insert(self.script.span(call.args[-1].value)[1], f", {text}", ARGUMENT)
        else:
            self.insert(self.script.offset(self.script.end(call)) - 1, text, 0)

    def under(self, statements: Sequence[cst.BaseStatement], header: str, *lines: str) -> None:
        """Put neighbouring statements under a header, with lines before it."""
        first, last = statements[0], statements[-1]
        self.touch(first)
        indent = self.script.indentation(first)
        top, bottom = self.script.line(first), self.script.end(last)[0]
        texts = [f"{indent}{line}{self.newline}" for line in (*lines, header)]
        start = self.script.offset((top, 0))
        self.insert(start, "".join(texts), HEADER)
        kept = self._inside_strings()
        for line in range(top, bottom + 1):
            text = self.script.lines[line - 1]
            start = self.script.offset((line, margin(text)))
            if line not in kept and text.strip():
                self.insert(start, self.script.module.default_indent, INDENT)

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

    def step(
        self, number: int, text: str, at: cst.CSTNode, *lines: str, once: bool = False
    ) -> None:
        """Insert the comment of a step, and lines, before the statement of a node."""
        self.before(at, *self.comment(number, text, at, once=once), *lines)

    def todo(self, at: cst.CSTNode, text: str) -> None:
        """Leave a decision to the author: a comment before the statement, and a note."""
        note = Note(self.script.line(at), 0, text)
        if note not in self.notes:
            self.notes.append(note)
            self.before(at, *self._wrapped(f"{TODO} {text}", at))

    def _wrapped(self, comment: str, at: cst.CSTNode) -> list[str]:
        """Return a comment in lines that fit the width at its indentation."""
        width = WIDTH - len(self.script.indentation(self.anchor(at)))
        return textwrap.wrap(comment, max(width, 40), subsequent_indent="# ")
