"""The loops over batches and epochs, and the functions that train."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.reading import DEPTH, Loop, Script, argument, dotted, names_in

__all__ = [
    "TrainLoop",
    "batches_of",
    "behind",
    "callers",
    "iterable",
    "last_with_call",
    "origins",
    "reaching",
    "sources",
    "train_loops",
    "training",
    "zipped",
]

AROUND = re.compile(r"^(enumerate|zip|iter|list|(itertools\.)?islice|tqdm(\.\w+)*\.(tqdm|trange))$")


@dataclass(frozen=True, eq=False)
class TrainLoop:
    """A loop over batches.

    Attributes:
        loop: the loop.
        step: the call in the loop that is part of a training step, or leads to one.
        epochs: the loop around it in the same function; None if there is none.
    """

    loop: Loop
    step: cst.Call
    epochs: Loop | None


def calls_of(script: Script, function: cst.FunctionDef) -> list[cst.Call]:
    """Return the calls of a function: by its name, as `step = jax.jit(function)`, or as a closure.

    `optimizer.step(function)` and `jax.lax.scan(function, ...)` call a closure.
    """
    return [
        c
        for c in script.calls
        if script.definition(c) is function
        or _inner(script, c) is function
        or (
            isinstance(c.func, cst.Attribute)
            and (c.func.attr.value == "step" or script.called(c) == "jax.lax.scan")
            and any(script.definition(arg.value) is function for arg in c.args)
        )
    ]


def _inner(script: Script, call: cst.Call) -> cst.FunctionDef | None:
    made = script.value(call.func)
    while isinstance(made, cst.Call) and made.args:
        made = made.args[0].value
    return script.definition(made) if made is not call.func and isinstance(made, cst.Name) else None


def train_loops(
    script: Script, steps: Iterable[cst.Call], depth: int = DEPTH
) -> tuple[TrainLoop, ...]:
    """Return the innermost loops around the calls, or around the calls of their functions."""
    found: dict[Loop, TrainLoop] = {}
    for call in steps:
        around = script.loops(call)
        if around:
            outer = around[1] if len(around) > 1 else None
            found.setdefault(around[0], TrainLoop(around[0], call, outer))
        elif depth and (function := script.function(call)) is not None:
            callers = calls_of(script, function)
            for each in train_loops(script, callers, depth - 1):
                found.setdefault(each.loop, each)
    return tuple(found.values())


def reaching(script: Script, steps: Iterable[cst.Call]) -> frozenset[cst.FunctionDef]:
    """Return the script's functions in which these calls are made, at any depth."""
    found: set[cst.FunctionDef] = set()
    pending = list(steps)
    while pending:
        for function in script.functions(pending.pop()):
            if function not in found:
                found.add(function)
                pending += calls_of(script, function)
    return frozenset(found)


def callers(script: Script, steps: Iterable[cst.Call]) -> list[cst.Call]:
    """Return the calls of functions in which these calls are made, at any depth."""
    return [call for f in reaching(script, steps) for call in calls_of(script, f)]


def training(script: Script, loops: Iterable[TrainLoop]) -> list[cst.CSTNode]:
    """Return the training loops, and the calls of functions that contain or call them."""
    return [*(loop.loop for loop in loops), *callers(script, [loop.step for loop in loops])]


def behind(
    script: Script, call: cst.CSTNode, nodes: Sequence[cst.CSTNode], depth: int = DEPTH
) -> Iterator[cst.CSTNode]:
    """Yield what makes a call after one of these nodes: it or a `with` around it, or a caller.

    The `with` may open the file that the call reads.
    """
    function = script.function(call)
    beside = [node for node in nodes if script.function(node) is function]
    first = call
    for around in script.ancestors(call):
        if around is function:
            break
        body = getattr(around, "body", ())
        if isinstance(body, Sequence):
            at = script.position(call, body)
            if any(0 <= script.position(node, body) < at for node in beside):
                yield first
                return
        if isinstance(around, cst.With):
            first = around
    if function is not None and depth:
        for each in calls_of(script, function):
            yield from behind(script, each, nodes, depth - 1)


def iterable(script: Script, loop: Loop) -> cst.BaseExpression | None:
    """Return the iterable of a `for`, without enumerate, zip and progress bars around it."""
    return _unwrapped(script, loop.iter) if isinstance(loop, cst.For) else None


def zipped(script: Script, loop: Loop) -> list[cst.BaseExpression]:
    """Return the further iterables of `for a, b in zip(x, y)`: y."""
    node = loop.iter if isinstance(loop, cst.For) else None
    while isinstance(node, cst.Call) and node.args and AROUND.match(script.called(node)):
        if script.called(node) == "zip":
            return [_unwrapped(script, arg.value) for arg in node.args[1:]]
        node = node.args[0].value
    return []


def _unwrapped(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Call) and node.args and AROUND.match(script.called(node)):
        node = node.args[0].value
    if isinstance(node, cst.Name):  # bar = tqdm(loader)
        made = script.value(node)
        if isinstance(made, cst.Call) and made.args and AROUND.match(script.called(made)):
            return made.args[0].value
    return node


def sources(
    script: Script, node: cst.BaseExpression, depth: int = DEPTH
) -> tuple[cst.BaseExpression, ...]:
    """Return the expressions whose value a name may have: several if it is a parameter."""
    found = script.binding(node) if dotted(node) else None
    if found is None or depth == 0 or found.how in ("for", "part", "with", "import"):
        return (node,)
    if found.how != "parameter":
        return sources(script, found.value, depth - 1) if found.value is not None else (node,)
    values = [value if value is not None else found.value for value in script.passed(found)]
    given = [sources(script, value, depth - 1) for value in values if value is not None]
    return tuple(each for several in given for each in several) or (node,)


def origins(
    script: Script, node: cst.BaseExpression, depth: int = DEPTH
) -> tuple[cst.BaseExpression, ...]:
    """Return the expressions whose value a name may have, also in functions that return them."""
    found: list[cst.BaseExpression] = []
    for each in sources(script, node):
        inner = _returned(script, each) if depth else []
        found += [s for value in inner for s in origins(script, value, depth - 1)] or [each]
    return tuple(found)


def _returned(script: Script, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what an own function returns for a call, or for a name of `a, b = f(x)`, if known."""
    bound = script.binding(node) if dotted(node) else None
    part = bound is not None and bound.how == "part"
    call = bound.value if bound is not None and part else node
    own = script.definition(call) if isinstance(call, cst.Call) else None
    if own is None:
        return []
    returns = (n for n in script.inside(own) if isinstance(n, cst.Return))
    values = [n.value for n in returns if n.value is not None and script.function(n) is own]
    if bound is None or not part:
        return values
    rows = [value.elements if isinstance(value, cst.Tuple) else () for value in values]
    starred = any(isinstance(each, cst.StarredElement) for row in rows for each in row)
    if starred or bound.index < 0 or any(len(row) <= bound.index for row in rows):
        return []
    return [row[bound.index].value for row in rows]


def range_of(script: Script, loop: Loop) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return end and step of a loop `for i in range(0, end, step)`."""
    node = iterable(script, loop)
    if isinstance(node, cst.Call) and script.called(node) == "range" and len(node.args) == 3:
        return node.args[1].value, node.args[2].value
    return None


def split_of(script: Script, loop: Loop) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return n and the batch of `for part in order.split(batch)`, for an order of n indices."""
    node, order = iterable(script, loop), extent(script, loop)
    if not isinstance(node, cst.Call) or not isinstance(order, cst.Call) or not order.args:
        return None
    size = argument(node, "split_size", 0 if script.called(node) != "torch.split" else 1)
    made = script.called(order)
    if size is None or made not in ("torch.randperm", "torch.arange"):
        return None
    positional = [arg for arg in order.args if arg.keyword is None]
    return (positional[0].value, size) if len(positional) == 1 else None


def batches_of(script: Script, loop: Loop) -> cst.BaseExpression | None:
    """Return the n of `for i in range(n)` if it is the length of an array, divided by a batch.

    Other loops, such as those over windows of a series, need all neighbours of a sample.
    """
    node = iterable(script, loop)
    if not isinstance(node, cst.Call) or script.called(node) != "range" or len(node.args) != 1:
        return None
    count = node.args[0].value
    sized = re.search(r"(\blen\([\w.]+\)|\.shape\[0\]) *//? *\w", script.code(script.value(count)))
    return count if sized else None


def extent(script: Script, loop: Loop) -> cst.CSTNode | None:
    """Return the expression for the number of samples that a loop divides into batches.

    That is the end of `range(0, len(x), batch)`, and for `order.split(batch)` the origin of order;
    for `range(len(x) // batch)`, the number of batches.
    """
    found = range_of(script, loop)
    if found is not None:
        return script.value(found[0])
    count = batches_of(script, loop)
    if count is not None:
        return script.value(count)
    node = iterable(script, loop)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name = script.called(node)
        if name == "torch.split" and node.args:
            return script.value(node.args[0].value)
        if node.func.attr.value == "split":
            return script.value(node.func.value)
    return None


def subscripted(script: Script, loop: Loop) -> tuple[str, ...]:
    """Return the names of the arrays from which a loop takes batches, in order.

    `x[i : i + batch]` and `x[order[i : i + batch]]` take batches from x, for i of the loop.
    """
    if not isinstance(loop, cst.For):
        return ()
    moving = {dotted(n) for n in script.inside(loop.target)} - {""}
    orders: set[str] = set()
    for node in script.inside(loop.body):
        if isinstance(node, cst.Assign) and names_in(node.value) & moving:
            moving |= {dotted(n) for t in node.targets for n in script.inside(t.target)} - {""}
    found: list[str] = []
    for node in script.inside(loop.body):
        if not isinstance(node, cst.Subscript) or not isinstance(node.value, cst.Name):
            continue
        read = {name for part in node.slice for name in names_in(part)}
        bound = script.binding(node.value)
        if bound is None or loop in script.ancestors(bound.at) or not read & moving:
            continue
        made = script.called(script.value(node.value))
        if re.search(r"(randperm|permutation|arange)$", made):
            orders.add(node.value.value)
        elif bound.how in ("assign", "part", "parameter") and node.value.value not in found:
            found.append(node.value.value)
    return tuple(name for name in found if name not in orders)


def last_with_call(
    script: Script, first: cst.CSTNode, suffix: str, until: Iterable[cst.CSTNode] = ()
) -> cst.CSTNode:
    """Return the last statement of a block with a call of this name; ``first`` if none follows it.

    Loops are passed over: the training loop may restore a state, too.

    Args:
        script: the script.
        first: a statement; those before it are not searched.
        suffix: the end of the called name.
        until: nodes that train; statements behind the first of them are not searched.
    """
    body = script.block(first)
    last = script.position(first, body)
    training = (script.position(node, body) for node in until)
    end = min((index for index in training if index > last), default=len(body))
    for call in script.calls:
        if script.called(call).endswith(suffix):
            index = script.position(call, body)
            if last < index < end and not isinstance(body[index], cst.For | cst.While):
                last = index
    return body[last] if last >= 0 else first
