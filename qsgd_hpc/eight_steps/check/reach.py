"""Possible origins of a value, and conditions that differ between ranks.

`reach` is a worklist over names, parameters, functions and their changes.

It overestimates: it follows every way by which a value might have been computed. A rule such as
"nothing here depends on hvd.size()" can therefore rely on what is *not* reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst

from qsgd_hpc.eight_steps.reading import Binding, Branch, Script, argument, dotted, receiver

__all__ = ["Reach", "complementary", "differs", "guarded", "left_before", "reach"]

RANKS = ("rank", "local_rank", "cross_rank")
CHANGERS = ("append", "extend", "insert", "update", "add", "setdefault", "map", "sort")


@dataclass(frozen=True, eq=False)
class Reach:
    """The possible dependencies of an expression.

    Attributes:
        api: names of Horovod's API; "compared_rank" for a rank that is only compared.
        calls: the calls that its value may depend on.
        bindings: the bindings that its value may depend on.
    """

    api: frozenset[str]
    calls: frozenset[cst.Call]
    bindings: frozenset[Binding]

    def shares(self) -> bool:
        """Return whether the value may depend on the rank or on the number of ranks."""
        return bool(self.api & {"rank", "size", "local_rank", "local_size", "cross_rank"})


def is_rank(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression is a rank's number, directly or through a name.

    Also true without the call (`hvd.rank`), because that is a separate finding.
    """
    return script.api(script.value(node)) in RANKS


def is_reference(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a name is looked up, not the name of an attribute, keyword or parameter."""
    if isinstance(node, cst.Attribute):
        return bool(dotted(node))
    if not isinstance(node, cst.Name):
        return False
    parent = script.parents.get(node)
    if isinstance(parent, cst.Attribute):
        return parent.attr is not node
    if isinstance(parent, cst.Arg):
        return parent.keyword is not node
    return not isinstance(parent, (cst.Param, cst.FunctionDef, cst.ClassDef, cst.ImportAlias))


def sources(script: Script, found: Binding) -> Iterator[cst.CSTNode]:
    """Yield the possible origins of the value of one binding."""
    if found.how == "parameter":
        for call in script.callers_of(found):
            given = argument(call, found.name, found.index)
            yield from [given] if given is not None else [each.value for each in call.args]
    if found.how in ("function", "class"):
        yield found.at
    if found.value is not None:
        yield from returned(script, found) or entries(script, found.value) or [found.value]


def entries(script: Script, node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the origins of `saved["epoch"]`, if a literal of the script has this entry.

    Else the other entries of a checkpoint, such as its best loss, would count as origins.
    """
    key = node.slice[0].slice if isinstance(node, cst.Subscript) and len(node.slice) == 1 else None
    if not isinstance(key, cst.Index) or not isinstance(key.value, cst.SimpleString):
        return []
    assert isinstance(node, cst.Subscript)
    made = [b.value for b in script.candidates(node.value, later=True) if b.value is not None]
    found: list[cst.CSTNode] = changed_at(script, place_of(script, node.value))
    has = False
    for each in made:
        if not isinstance(each, cst.Dict):
            found.append(each)
            continue
        for entry in each.elements:
            if not isinstance(entry, cst.DictElement):
                return []
            if not isinstance(entry.key, cst.SimpleString):
                return []
            if entry.key.raw_value == key.value.raw_value:
                has = True
                found.append(entry.value)
    return found if has else []


def returned(script: Script, found: Binding) -> list[cst.BaseExpression]:
    """Return what an own function returns for one name of `a, b = f(x)`, and the arguments.

    Empty if that is not known.
    """
    call = found.value
    if found.how != "part" or found.index < 0 or not isinstance(call, cst.Call):
        return []
    own = script.definition(call)
    if own is None:
        return []
    values = [n.value for n in script.inside(own) if isinstance(n, cst.Return)]
    elements: list[cst.BaseExpression] = []
    for value in values:
        given = value.elements if isinstance(value, cst.Tuple) else ()
        if len(given) <= found.index or any(isinstance(e, cst.StarredElement) for e in given):
            return []
        elements.append(given[found.index].value)
    return [*elements, *(each.value for each in call.args)] if elements else []


def unpacked(script: Script, found: Binding) -> set[cst.CSTNode]:
    """Return the own function that `a, b = f(x)` calls for one of its names, if any."""
    call = found.value if found.how == "part" else None
    own = script.definition(call) if isinstance(call, cst.Call) else None
    return {own} if own is not None else set()


Place = tuple[cst.CSTNode | None, str]  # the function of a local name, and the name


@lru_cache(maxsize=8)
def shared(script: Script) -> frozenset[str]:
    """Return the names that functions declare as global or nonlocal."""
    found = (n for n in script.nodes if isinstance(n, cst.Global | cst.Nonlocal))
    return frozenset(item.name.value for each in found for item in each.names)


def place_of(script: Script, node: cst.CSTNode) -> Place:
    """Return the function in which a name is local, and the name; None and the name for others.

    Others are known everywhere, or given to a function under any name.
    """
    name, scope = dotted(node), script.scope(node)
    own = script.bindings.get((scope, name), ()) if isinstance(scope, cst.FunctionDef) else ()
    local = bool(own) and "." not in name and name not in shared(script)
    return (scope if local and all(b.how != "parameter" for b in own) else None, name)


@lru_cache(maxsize=8)
def changes(script: Script) -> dict[Place, list[cst.CSTNode]]:
    """Return the values added to the lists, dictionaries or numbers of the script."""
    found: dict[Place, list[cst.CSTNode]] = {}
    for node in script.nodes:
        if isinstance(node, cst.Call):
            if (owner := receiver(node, *CHANGERS)) is not None:
                added = [each.value for each in node.args]
                found.setdefault(place_of(script, owner), []).extend(added)
        elif isinstance(node, cst.Assign):
            for target in (each.target for each in node.targets):
                parts = target.elements if isinstance(target, cst.Tuple) else ()
                for part in [each.value for each in parts] or [target]:  # a[i], b[i] = x, y
                    if isinstance(part, cst.Subscript):
                        found.setdefault(place_of(script, part.value), []).append(node.value)
        elif isinstance(node, cst.AugAssign):
            found.setdefault(place_of(script, node.target), []).append(node.value)
    return found


def changed_at(script: Script, place: Place) -> list[cst.CSTNode]:
    """Return the values that may be added to what a name at this place stands for."""
    known = changes(script)
    return [value for each in {place, (None, place[1])} for value in known.get(each, ())]


def compared(script: Script, node: cst.CSTNode) -> bool:
    parent = script.parents.get(node)
    return isinstance(parent, (cst.Comparison, cst.ComparisonTarget)) or (
        isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not)
    )


def possible(script: Script, node: cst.CSTNode) -> tuple[Binding, ...]:
    """Return the bindings that a name may have: in the body of a loop over it, those of the loop.

    Loops over training and validation data often have the same names.
    """
    several = script.candidates(node, later=True)
    for loop in script.loops(node):
        if not isinstance(loop, cst.For) or loop.body not in script.ancestors(node):
            continue
        own = tuple(b for b in several if loop in (b.at, *script.ancestors(b.at)))
        if any(loop.target in (b.at, *script.ancestors(b.at)) for b in own):
            return own
    return several


@lru_cache(maxsize=4096)
def reach(script: Script, *starts: cst.CSTNode) -> Reach:
    """Return all that these expressions may depend on."""
    api: set[str] = set()
    calls: set[cst.Call] = set()
    bindings: set[Binding] = set()
    seen: set[cst.CSTNode] = set()
    changed: set[Place] = set()
    entered: set[cst.CSTNode] = set()  # functions whose call, with its arguments, is reached
    around = {each for node in starts for each in script.functions(node)}
    waiting: list[cst.CSTNode] = list(starts)
    while waiting:
        for node in script.inside(waiting.pop()):
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, cst.Call):
                calls.add(node)
                if (own := script.definition(node)) is not None:
                    waiting.append(own)
                    entered |= {own} - around
            if not is_reference(script, node):
                continue
            call = script.parents.get(node)
            whole = call if isinstance(call, cst.Call) and call.func is node else node
            if compared(script, whole) and is_rank(script, whole):
                api.add("compared_rank")
                continue
            api |= script.api_names(node)
            for found in possible(script, node):
                if found.how != "import":
                    bindings.add(found)
                    entered |= unpacked(script, found) - around
                    if found.how == "parameter" and script.scope(found.at) in entered:
                        waiting.extend([found.value] if found.value is not None else [])
                    else:
                        waiting.extend(sources(script, found))
            place = place_of(script, node)
            if place not in changed:
                changed.add(place)
                waiting.extend(changed_at(script, place))
    return Reach(frozenset(api), frozenset(calls), frozenset(bindings))


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
