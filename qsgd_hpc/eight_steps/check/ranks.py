"""Conditions on the rank: branches that run on some ranks only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.reach import is_rank, reach
from qsgd_hpc.eight_steps.reading import Branch, Script

__all__ = ["complementary", "differs", "guarded", "left_before"]

# Usual names in conditions on the rank, for values that the text does not show.
CHIEF = re.compile(
    r"rank|is_?(main|master|chief|root|primary|leader|zero)|(main|master|chief)_?process",
    re.IGNORECASE,
)


def differs(script: Script, test: cst.CSTNode) -> bool:
    """Return whether a condition certainly differs between ranks, such as `hvd.rank() == 0`."""
    made = script.value(test)
    if is_rank(script, made):
        return True
    if isinstance(made, cst.Comparison):
        parts = [made.left, *(target.comparator for target in made.comparisons)]
        return any(is_rank(script, part) for part in parts)
    if isinstance(made, cst.UnaryOperation) and isinstance(made.operator, cst.Not):
        return differs(script, made.expression)
    if isinstance(made, cst.BooleanOperation):
        return differs(script, made.left) or differs(script, made.right)
    if isinstance(made, cst.Call):
        own = script.definition(made)
        returned = only_return(own) if own is not None else None
        return returned is not None and differs(script, returned)
    return False


def complementary(script: Script, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Return whether each rank takes exactly one of two branches: `rank == 0` and `rank != 0`."""
    return _negated(script, one) == script.code(other) or _negated(script, other) == script.code(
        one
    )


OPPOSITES: dict[type[cst.BaseCompOp], str] = {cst.Equal: "!=", cst.NotEqual: "=="}


def _negated(script: Script, test: cst.CSTNode) -> str:
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return script.code(test.expression)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        (target,) = test.comparisons
        sign = OPPOSITES.get(type(target.operator))
        if sign:
            return f"{script.code(test.left)} {sign} {script.code(target.comparator)}"
    return ""


def only_return(function: cst.FunctionDef) -> cst.BaseExpression | None:
    """Return the expression returned by a function that consists of one return statement."""
    lines = [line for line in function.body.body if isinstance(line, cst.SimpleStatementLine)]
    small = [each for line in lines for each in line.body if not is_docstring(each)]
    if len(lines) == len(function.body.body) and len(small) == 1:
        only = small[0]
        return only.value if isinstance(only, cst.Return) else None
    return None


def is_docstring(node: cst.BaseSmallStatement) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString)


def guarded(script: Script, branches: Iterable[Branch]) -> bool:
    """Return whether one of these conditions may depend on the rank."""
    return any(may_differ(script, each.test) for each in branches)


def may_differ(script: Script, test: cst.BaseExpression) -> bool:
    if CHIEF.search(script.code(test)) or differs(script, test):
        return True
    return bool(reach(script, test).api & {"rank", "local_rank", "cross_rank", "compared_rank"})


def left_before(script: Script, node: cst.CSTNode) -> Iterator[cst.If]:
    """Yield the `if` statements on the rank by which some ranks leave before this node.

    They are in the same function, above the node and not around it, and their body ends in return,
    or in continue or break of a loop around the node.
    """
    function = script.function(node)
    around = set(script.ancestors(node))
    for each in script.inside(function if function is not None else script.module):
        if not isinstance(each, cst.If) or each in around or script.function(each) is not function:
            continue
        if script.end(each) > script.start(node) or not differs(script, each.test):
            continue
        block = script.parents.get(each)
        if block in around and leaves(script, each, node):
            yield each


def leaves(script: Script, node: cst.If, later: cst.CSTNode) -> bool:
    """Return whether the body of an `if` ends by skipping the rest of the block."""
    body = node.body.body
    last = body[-1] if body else None
    small = last.body[-1] if isinstance(last, cst.SimpleStatementLine) and last.body else last
    if isinstance(small, cst.Return):
        return True
    if isinstance(small, (cst.Continue, cst.Break)):
        inner = script.loops(node)
        return bool(inner) and inner[0] in script.loops(later)
    return False
