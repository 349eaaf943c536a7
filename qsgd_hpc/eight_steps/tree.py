"""The lines of a script, and its tree: positions and ancestors of its nodes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import CodePosition, CodeRange

__all__ = [
    "Branch",
    "Collector",
    "Loop",
    "Tree",
    "diff",
    "lines",
    "margin",
    "once_per_node",
    "starts",
    "without_form_feeds",
]

Answer = TypeVar("Answer")

Loop = cst.For | cst.While
SCOPES = {cst.FunctionDef, cst.Lambda, cst.ClassDef}
# Half of libcst's nodes. They have no children, and no query concerns them.
BLANK = {cst.SimpleWhitespace, cst.Newline}
# Lines as counted by Python's parser: they end only in "\n", "\r\n" or a single "\r".
# `str.splitlines()` also splits at ten other characters, which comments and strings may contain.
END = re.compile(r"\r\n?|\n")
MARGIN = re.compile(r"[ \t\f]*\f")


def lines(text: str) -> list[str]:
    """Return the lines of a text without line ends; the last is empty after a line end."""
    return END.split(text)


def starts(text: str) -> tuple[int, ...]:
    """Return the offset of each line in a text."""
    return (0, *(each.end() for each in END.finditer(text)))


def margin(line: str) -> int:
    """Return the length of a line up to and including its last leading form feed, 0 without one.

    Python counts the indentation from there.
    """
    found = MARGIN.match(line)
    return found.end() if found else 0


def without_form_feeds(text: str) -> tuple[str, tuple[int, ...]]:
    """Remove the margin from each line, because libcst loses, doubles or rejects it.

    Returns:
        The text, and the number of characters removed from each line; empty without form feeds.
    """
    if "\f" not in text:
        return text, ()
    ends = [*END.findall(text), ""]
    found = lines(text)
    # A line that is all margin becomes spaces: if empty, a "\r" before it and the "\n" after it
    # would become one line end.
    found = [" " * len(line) if margin(line) == len(line) else line for line in found]
    lost = tuple(margin(line) for line in found)
    kept = (f"{line[n:]}{end}" for line, n, end in zip(found, lost, ends, strict=True))
    return "".join(kept), lost


def diff(before: str, after: str, name: str, new_name: str) -> str:
    """Return the difference of two texts as `diff -u`, for which only "\\n" ends a line."""
    found = difflib.unified_diff([*_kept(before)], [*_kept(after)], name, new_name)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found
    )


def _kept(text: str) -> Iterator[str]:
    return (each[0] for each in re.finditer(r"[^\n]*\n|[^\n]+", text))


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch of a condition.

    Attributes:
        node: the if, the conditional expression, or the `and`/`or` that decides.
        test: the condition.
        taken: its value if this branch runs.
    """

    node: cst.CSTNode
    test: cst.BaseExpression
    taken: bool


def once_per_node(query: Callable[[Any, Any], Answer]) -> Callable[[Any, Any], Answer]:
    """Let a method of a tree compute its answer for each node only once: rules ask again."""
    answers_in = f"_answers_of_{query.__name__}"

    @wraps(query)
    def remembered(tree: Any, node: Any) -> Answer:
        answers = tree.__dict__.setdefault(answers_in, {})
        if node not in answers:
            answers[node] = query(tree, node)
        return answers[node]  # type: ignore[no-any-return]

    return remembered


class Collector(cst.CSTVisitor):
    """Lists the nodes of a tree but white space (outer ones first); calls, arguments first."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[cst.CSTNode] = []
        self.calls: list[cst.Call] = []
        self.spans: dict[cst.CSTNode, tuple[int, int]] = {}
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.scopes: dict[cst.CSTNode, cst.CSTNode] = {}
        self._path: list[cst.CSTNode] = []
        self._scopes: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if type(node) in BLANK:
            return False
        self.spans[node] = (len(self.nodes), 0)
        self.nodes.append(node)
        if self._path:
            self.parents[node] = self._path[-1]
            self.scopes[node] = self._scopes[-1]
        self._path.append(node)
        if type(node) in SCOPES or not self._scopes:
            self._scopes.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if type(original_node) in BLANK:
            return
        self._path.pop()
        if self._scopes[-1] is original_node:
            self._scopes.pop()
        self.spans[original_node] = (self.spans[original_node][0], len(self.nodes))
        if isinstance(original_node, cst.Call):
            self.calls.append(original_node)


@dataclass(frozen=True, eq=False)
class Tree:
    """A script's tree, with queries on the positions of its nodes.

    Attributes:
        path: path of the script, for messages.
        text: its text.
        encoding: its encoding.
        module: root of the tree; all arguments of methods are nodes of it.
        nodes: every node but white space, outer ones before inner ones.
        calls: every call, in the order of evaluation (arguments first).
        spans: the range in `nodes` of each node and the nodes inside of it.
        scopes: the function, class or module around each node but the module.
        margins: length of each line's margin up to a form feed, which the module does not contain.
    """

    path: Path
    text: str
    encoding: str
    module: cst.Module
    nodes: tuple[cst.CSTNode, ...]
    calls: tuple[cst.Call, ...]
    spans: Mapping[cst.CSTNode, tuple[int, int]]
    positions: Mapping[cst.CSTNode, CodeRange]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    scopes: Mapping[cst.CSTNode, cst.CSTNode]
    margins: tuple[int, ...]

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line, from 1, and the column, from 0, at which a node begins."""
        return self._place(self.positions[node].start)

    def end(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line, from 1, and the column, from 0, after a node's last character."""
        return self._place(self.positions[node].end)

    def _place(self, found: CodePosition) -> tuple[int, int]:
        off = self.margins[found.line - 1] if self.margins else 0
        return found.line, found.column + off

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of the text, without line ends."""
        return tuple(lines(self.text))

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        """The offset of each line in the text."""
        return starts(self.text)

    def offset(self, place: tuple[int, int]) -> int:
        """Return the offset of a line and column in the text."""
        return self.line_starts[place[0] - 1] + place[1]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the offsets of an expression with the parentheses around it."""
        start, end = self.offset(self.start(node)), self.offset(self.end(node))
        start -= sum(len(self.code(each)) for each in getattr(node, "lpar", ()))
        end += sum(len(self.code(each)) for each in getattr(node, "rpar", ()))
        return start, end

    def indentation(self, statement: cst.CSTNode) -> str:
        """Return the text before a statement on its line, normally white space."""
        line, column = self.start(statement)
        before = self.lines[line - 1][:column]
        return before[margin(before) :]

    def line(self, node: cst.CSTNode) -> int:
        """Return the line, from 1, at which a node begins."""
        return self.start(node)[0]

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        return self.module.code_for_node(node)

    @cached_property
    def comments(self) -> Mapping[int, str]:
        """The comment of each line that has one."""
        return {self.line(n): n.value for n in self.nodes if isinstance(n, cst.Comment)}

    def inside(self, node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
        """Return a node and all nodes inside of it, outer ones first."""
        begin, end = self.spans[node]
        return self.nodes[begin:end]

    def calls_in(self, node: cst.CSTNode) -> tuple[cst.Call, ...]:
        """Return the calls inside of a node, itself included, outside first."""
        return tuple(n for n in self.inside(node) if isinstance(n, cst.Call))

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, the module last."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def functions(self, node: cst.CSTNode) -> tuple[cst.FunctionDef, ...]:
        """Return the functions around a node, the innermost first."""
        return tuple(n for n in self.ancestors(node) if isinstance(n, cst.FunctionDef))

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node."""
        return next(iter(self.functions(node)), None)

    def scope(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the scope of a name bound at this node: a function, a class or the module."""
        return self.scopes.get(node, self.module)

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Return the innermost class around a node."""
        while (scope := self.scopes.get(node)) is not None:
            if isinstance(scope, cst.ClassDef):
                return scope
            node = scope
        return None

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the complete statement that contains a node."""
        for each in (node, *self.ancestors(node)):
            if isinstance(each, cst.BaseStatement):
                return each
        raise TypeError(f"{type(node).__name__} is not part of a statement")

    def block(self, statement: cst.CSTNode) -> Sequence[cst.CSTNode]:
        """Return the statements of the block that a statement is in."""
        body = getattr(self.parents.get(statement), "body", ())
        return body if isinstance(body, Sequence) else ()

    def position(self, node: cst.CSTNode, body: Sequence[cst.CSTNode]) -> int:
        """Return the index of the statement of a block that contains a node, or -1."""
        around = {node, *self.ancestors(node)}
        return next((i for i, each in enumerate(body) if each in around), -1)

    def _local(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Yield the ancestors of a node with the child on the path, up to its function."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
                return
            yield parent, child
            child = parent

    def loops(self, node: cst.CSTNode) -> tuple[Loop, ...]:
        """Return the loops of the same function that repeat a node, the innermost first."""
        around = ((parent, child) for parent, child in self._local(node))
        return tuple(p for p, c in around if isinstance(p, (cst.For, cst.While)) and repeats(p, c))

    def branches(self, node: cst.CSTNode) -> tuple[Branch, ...]:
        """Return the conditions of the same function that a node depends on, innermost first."""
        found = (branch(parent, child) for parent, child in self._local(node))
        return tuple(each for each in found if each is not None)

    def exclusive(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether two nodes are on different sides of one condition."""
        sides = {branch.node: branch.taken for branch in self.branches(one)}
        return any(sides.get(b.node, b.taken) != b.taken for b in self.branches(other))

    def precedes(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether a node is above another in its function, and runs whenever that runs."""
        sides = {branch.node: branch.taken for branch in self.branches(other)}
        return (
            self.function(one) is self.function(other)
            and self.start(one) < self.start(other)
            and all(sides.get(b.node) == b.taken for b in self.branches(one))
        )


def repeats(loop: Loop, child: cst.CSTNode) -> bool:
    """Return whether a loop repeats this child: its body, and a while's condition."""
    if isinstance(loop, cst.While):
        return child is loop.body or child is loop.test
    return child is loop.body


def branch(parent: cst.CSTNode, child: cst.CSTNode) -> Branch | None:
    """Return the condition under which a parent evaluates its child, if there is one."""
    if isinstance(parent, (cst.If, cst.IfExp)) and child is not parent.test:
        return Branch(parent, parent.test, child is parent.body)
    if isinstance(parent, cst.BooleanOperation) and child is parent.right:
        return Branch(parent, parent.left, isinstance(parent.operator, cst.And))
    return None
