"""Step 3 for arrays in memory: each rank keeps its part of the arrays that a loop slices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, extent, iterable, subscripted, training
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, names_in

__all__ = ["leave_data", "point_out_parts", "shard_arrays", "slice_of"]

# Draws of samples, as of chunks of a text.
DRAWN = re.compile(
    r"^((numpy\.)?random\.(randint|randrange|choices?|sample)|torch\.randint"
    r"|numpy\.random\.(default_rng|RandomState)\(\)\.(integers|randint|choice))$"
)
SHAPES = ("shape", "device", "dtype", "ndim", "size")
SIZE = re.compile(r"(^|\.)(len|int|max|min|round|ceil|floor|size|randperm|permutation|arange)$")


def slice_of(name: str) -> str:
    """Return the slice of a rank's part of an array, as Python code."""
    return f"slice(hvd.rank(), len({name}) // hvd.size() * hvd.size(), hvd.size())"


def leave_data(plan: Plan, loop: TrainLoop) -> None:
    """Leave the data of a loop, which were not recognised, to the author."""
    script = plan.script
    played = any(script.plays(call) for call in script.calls)
    drawn = next((name for name in _called(script, loop.loop) if DRAWN.match(name)), "")
    over = iterable(script, loop.loop)
    counts = over is None or script.called(over) == "range"
    shard = f"{words.SHARD_IT} {words.WHOLE}" if counts else words.SHARD_IT
    text = words.PLAY_IT if played else shard
    if drawn and not played:
        text = f"let each rank draw other samples by {drawn}: add hvd.rank() to its seed here."
    plan.todo(loop.loop, text)


def _called(script: Script, node: cst.CSTNode, depth: int = 3) -> Iterator[str]:
    """Yield the names that a part of a script calls, also in the script's own functions."""
    for call in script.calls_in(node):
        yield script.called(call)
        function = script.definition(call)
        if function is not None and depth:
            yield from _called(script, function.body, depth - 1)


def shard_arrays(plan: Plan, loop: TrainLoop) -> bool:
    """Shard the arrays that a loop slices, after they are made; False if there are none."""
    script = plan.script
    names = subscripted(script, loop.loop)
    end = extent(script, loop.loop)
    if not names or end is None:
        return False
    if not any(name in names_in(end) for name in names):
        leave_data(plan, loop)
        return True
    if set(names) <= plan.arrays:
        return True
    place, inside = _place(plan, loop, names)
    if place is None:
        plan.todo(
            loop.loop, f"shard {', '.join(names)}: a rank's part, of equal size on all ranks."
        )
        return True
    lines = [
        *plan.comment(3, words.SHARD, place),
        f"shard = {slice_of(names[0])}",
        f"{', '.join(names)} = {', '.join(f'{name}[shard]' for name in names)}",
        *_sizes(plan, loop, names, place),
    ]
    if inside:
        plan.before(place, *lines)
    else:
        plan.after(place, *lines)
    plan.arrays |= set(names)
    begin = script.start(place) if inside else script.end(place)
    plan.parts |= {(script.scope(place), name): begin for name in names}
    return True


def point_out_parts(plan: Plan, loops: Sequence[TrainLoop]) -> None:
    """Add a TODO where a script first reads arrays of which each rank has a part.

    That is behind its training, or between the lines that divide them and its training.
    """
    script = plan.script
    trained = training(script, loops)
    first: dict[tuple[cst.CSTNode, str], cst.CSTNode] = {}
    for node in script.nodes:
        if not isinstance(node, cst.Name) or (script.scope(node), node.value) not in plan.parts:
            continue
        beside = [each for each in trained if script.scope(each) is script.scope(node)]
        begin = min((script.end(each) for each in beside), default=script.end(node))
        bound, divided = script.binding(node), plan.parts[script.scope(node), node.value]
        early = script.start(node) >= divided and not script.loops(node)
        if (
            (early or script.start(node) >= begin)
            and not any(each in script.ancestors(node) for each in beside)
            and bound is not None
            and script.end(bound.at) <= begin
            and _is_read(script, node)
        ):
            first.setdefault((script.scope(node), node.value), plan.anchor(node))
    for statement in dict.fromkeys(first.values()):
        names = ", ".join(name for (_, name), each in first.items() if each is statement)
        plan.todo(statement, f"here and below, only this rank's part of {names} is left.")


def _is_read(script: Script, node: cst.Name) -> bool:
    """Return whether the samples of an array are read here, not only its shape."""
    parent = script.parents.get(node)
    if isinstance(parent, cst.Attribute):
        return parent.value is node and parent.attr.value not in SHAPES
    if isinstance(parent, cst.Arg):
        return parent.value is node and script.called(script.parents.get(parent)) != "len"
    return not isinstance(parent, cst.AssignTarget | cst.Param | cst.Del)


def _sizes(
    plan: Plan, loop: TrainLoop, names: Sequence[str], place: cst.BaseStatement
) -> list[str]:
    """Return the lines that compute again the sizes of arrays which a loop reads.

    Args:
        plan: the plan to extend by a TODO for each that cannot be computed again.
        loop: the loop.
        names: the arrays.
        place: the statement after which they are sharded.
    """
    script = plan.script
    scope = script.scope(place)
    stale = [
        b
        for b in script.assignments
        if script.scope(b.at) is scope
        and script.end(b.at) <= script.end(place)
        and b.name not in names
        and b.value is not None
        and _is_size(script, b.value, names)
    ]
    needed = {dotted(n) for n in script.inside(loop.epochs or loop.loop) if isinstance(n, cst.Name)}
    lines: list[str] = []
    for b in reversed(stale):
        if b.name not in needed or b.value is None:
            continue
        needed |= names_in(b.value)
        if len(script.bindings[scope, b.name]) > 1 or script.branches(b.at) or script.loops(b.at):
            plan.todo(b.at, f"{b.name} must be computed from this rank's part of {names[0]}.")
        else:
            lines.insert(0, f"{b.name} = {script.code(b.value)}")
    return lines


def _is_size(script: Script, node: cst.BaseExpression, names: Sequence[str]) -> bool:
    """Return whether a value depends on the lengths of arrays and on nothing else in them."""
    inner = script.calls_in(node)
    array = "|".join(map(re.escape, names))
    sizes = rf"\blen\(({array})\)|\b({array})\.(shape\[0\]|size\(0\))"
    text = script.code(node)
    return (
        bool(re.search(sizes, text))
        and not names_in(cst.parse_expression(re.sub(sizes, "0", text))) & set(names)
        and all(SIZE.search(script.called(call)) for call in inner)
    )


def _place(
    plan: Plan, loop: TrainLoop, names: Sequence[str]
) -> tuple[cst.BaseStatement | None, bool]:
    """Return the statement to shard after, and False; or the one to shard before, and True.

    That is the statement that makes the last array, or the first one of a function whose parameters
    are the arrays. None if there is no such statement.
    """
    script = plan.script
    scope = script.scope(loop.loop)
    own = [script.bindings.get((scope, name), ()) for name in names]
    start = script.start(loop.loop)
    if all(own) and all(b.how == "parameter" for several in own for b in several):
        assert isinstance(scope, cst.FunctionDef)
        first = scope.body.body[0]
        if scope.get_docstring() is not None and len(scope.body.body) > 1:
            first = scope.body.body[1]
        return (first, True) if isinstance(first, cst.BaseStatement) else (None, True)
    if not all(own):  # made at module level, used in a function
        scope = script.module
        own = [script.bindings.get((scope, name), ()) for name in names]
        start = (10**9, 0) if all(own) else start
    if not all(own):
        return None, False
    made = [b for several in own for b in several if script.end(b.at) <= start]
    if not made or any(script.loops(b.at) for b in made):
        return None, False
    last = max(made, key=lambda b: script.end(b.at))
    body = scope.body.body if isinstance(scope, cst.FunctionDef) else script.module.body
    index = script.position(last.at, body)
    found = body[index] if index >= 0 else None
    return (found, False) if isinstance(found, cst.BaseStatement) else (None, False)
