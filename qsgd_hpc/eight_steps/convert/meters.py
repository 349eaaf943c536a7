"""Step 8 for objects that average, such as the `AverageMeter` of PyTorch's ImageNet example."""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, sources
from qsgd_hpc.eight_steps.convert.metrics import counts, divisors, sum_over_ranks, type_of, uses
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import (
    DEPTH,
    Binding,
    Script,
    argument,
    dotted,
    is_literal,
    names_in,
    receiver,
)

__all__ = ["sum_meters"]

CLOCK = re.compile(r"^time\.(time|monotonic|perf_counter)(_ns)?$")


@dataclass(frozen=True, eq=False)
class Averager:
    """A class whose objects divide a sum by a count.

    Attributes:
        update: the method that adds to both.
        total: the attribute that is divided, such as "self.sum".
        count: the attribute that divides it.
        added: the values that are added to each of both.
        derived: the attributes that are computed from both, in order.
        resets: the methods that set both to their initial values.
    """

    update: cst.FunctionDef
    total: str
    count: str
    added: Mapping[str, Sequence[cst.BaseExpression]]
    derived: Mapping[str, cst.BaseExpression]
    resets: frozenset[str]


@dataclass(frozen=True, eq=False)
class Meter:
    """An object that averages, and the calls by which a loop updates it."""

    name: str
    kind: Averager
    calls: tuple[cst.Call, ...]


def sum_meters(
    plan: Plan, loop: TrainLoop, loops: Sequence[TrainLoop], complete_too: bool
) -> tuple[list[str], list[str]]:
    """Sum what objects average in a loop over the ranks.

    Args:
        plan: the plan; what cannot be summed gets a TODO.
        loop: a loop over a rank's own batches.
        loops: all such loops: one that adds to the sum of another would mix one rank's and all's.
        complete_too: whether the same loop also iterates over data that every rank has completely.
    Returns:
        The names of the objects and of others that hold them, and the lines that sum them.
    """
    script = plan.script
    found = updated(script, loop)
    groups: dict[Averager, list[Meter]] = {}
    for meter in found:
        if measures_time(script, meter) or not is_used(script, loop, meter):
            continue
        adding = (each.loop for each in loops if _adds(script, each, loop, meter))
        anew = all(starts_anew(script, meter.kind, meter.name, each) for each in adding)
        if anew and is_ratio(plan, loop, meter, complete_too) and is_alike(script, loop, meter):
            groups.setdefault(meter.kind, []).append(meter)
        else:
            plan.todo(loop.loop, words.PARTIAL.format(name=meter.name))
    lines = [line for several in groups.values() for line in summing(script, loop, several)]
    names = [meter.name for meter in found]
    return [*names, *(b for name in names for b in holders(script, loop, name))], lines


def _adds(script: Script, other: TrainLoop, loop: TrainLoop, meter: Meter) -> bool:
    """Return whether a loop, or another one in its function, updates an object."""
    beside = script.function(other.loop) is script.function(loop.loop)
    method = meter.kind.update.name.value
    calls = script.calls_in(other.loop.body) if beside else ()
    return any(dotted(receiver(call, method)) == meter.name for call in calls)


def updated(script: Script, loop: TrainLoop) -> list[Meter]:
    """Return the objects of the script's own averaging classes that a loop updates."""
    known: dict[cst.ClassDef, Averager | None] = {}
    kinds: dict[str, Averager] = {}
    calls: dict[str, list[cst.Call]] = {}
    for call in script.calls_in(loop.loop.body):
        meter = receiver(call)
        name = dotted(meter)
        if meter is None or not name or name == "self":
            continue
        owners = {script.own_class(each) for each in sources(script, meter)}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is None:
            continue
        if owner not in known:
            known[owner] = averager(script, owner)
        kind = known[owner]
        if kind is not None and receiver(call, kind.update.name.value) is not None:
            kinds[name] = kind
            calls.setdefault(name, []).append(call)
    return [Meter(name, kinds[name], tuple(several)) for name, several in calls.items()]


def averager(script: Script, owner: cst.ClassDef) -> Averager | None:
    """Return how a class averages, if it does."""
    for method in owner.body.body:
        if isinstance(method, cst.FunctionDef) and method.name.value != "__init__":
            found = _averager(script, owner, method)
            if found is not None:
                return found
    return None


def _averager(script: Script, owner: cst.ClassDef, update: cst.FunctionDef) -> Averager | None:
    """Return how a class averages if this method only adds to a sum and to its divisor."""
    added: dict[str, list[cst.BaseExpression]] = {}
    derived: dict[str, cst.BaseExpression] = {}
    for node in script.inside(update.body):
        if isinstance(node, cst.Call) and _is_own_call(script, node):
            return None
        for name, value, adds in _assigned(node):
            if adds:
                added.setdefault(name, []).append(value)
            elif isinstance(node, cst.AugAssign):
                return None
            elif _own(value):
                derived[name] = value
    pair = next(_quotients(script, owner, set(added)), None)
    if pair is None or set(added) != set(pair):
        return None
    values = [value for name in pair for value in added[name]]
    if any(_own(value) & {*added, *derived} for value in values):
        return None  # such as a moving average
    known = set(added)
    for name, value in derived.items():
        if name in added or not _own(value) <= known or not _is_global(script, value):
            return None
        known.add(name)
    total, count = pair
    if not all(_counts(script, update, value) for value in added[count]):
        return None
    return Averager(update, total, count, added, derived, _resets(script, owner, pair))


def _is_own_call(script: Script, call: cst.Call) -> bool:
    """Return whether a method calls another one of its object, or of a part of it."""
    return bool(re.match(r"(self\.|super\()", script.code(call.func)))


def _assigned(node: cst.CSTNode) -> Iterator[tuple[str, cst.BaseExpression, bool]]:
    """Yield the attributes of `self` that a statement changes, the value, and whether it adds."""
    if isinstance(node, cst.AugAssign):
        if dotted(node.target).startswith("self."):
            yield dotted(node.target), node.value, isinstance(node.operator, cst.AddAssign)
    elif isinstance(node, cst.Assign):
        value = node.value
        for name in (dotted(each.target) for each in node.targets):
            if not name.startswith("self."):
                continue
            if (
                isinstance(value, cst.BinaryOperation)
                and isinstance(value.operator, cst.Add)
                and dotted(value.left) == name
            ):
                yield name, value.right, True
            else:
                yield name, value, False


def _own(value: cst.CSTNode) -> set[str]:
    """Return the attributes of `self` that an expression reads."""
    return {name for name in names_in(value) if re.fullmatch(r"self\.\w+", name)}


def _is_global(script: Script, value: cst.BaseExpression) -> bool:
    """Return whether an expression has the same meaning outside of its class."""
    names = {name for name in names_in(value) if "." not in name} - {"self"}
    return all(
        hasattr(builtins, name)
        or any(b.how == "import" for b in script.bindings.get((script.module, name), ()))
        for name in names
    )


def _quotients(script: Script, owner: cst.ClassDef, added: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the dividend and the divisor of quotients of such attributes in a class."""
    for node in script.inside(owner.body):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            above, below = _own(node.left) & added, _own(node.right) & added
            if len(above) == len(below) == 1 and above != below:
                yield above.pop(), below.pop()


def _counts(script: Script, update: cst.FunctionDef, value: cst.BaseExpression) -> bool:
    """Return whether a method adds 1, a parameter, or a length."""
    given = {b.name for b in _parameters(script, update)}
    return dotted(value) in given or type_of(script, value) == "number"


def _parameters(script: Script, update: cst.FunctionDef) -> Iterator[Binding]:
    for (scope, _), several in script.bindings.items():
        if scope is update:
            yield from (b for b in several if b.how == "parameter")


def _resets(script: Script, owner: cst.ClassDef, pair: tuple[str, str]) -> frozenset[str]:
    """Return the methods that set both attributes to constants, always."""
    found = []
    for method in owner.body.body:
        if not isinstance(method, cst.FunctionDef):
            continue
        begins = {
            name
            for name in pair
            for bound in script.bindings.get((owner, name), ())
            if script.function(bound.at) is method
            and is_literal(bound.value)
            and not script.branches(bound.at)
        }
        again = any(script.code(c.func) == "self.__init__" for c in script.calls_in(method.body))
        if again or begins == set(pair):
            found.append(method.name.value)
    return frozenset(found) - {"__init__"}


def is_used(script: Script, loop: TrainLoop, meter: Meter) -> bool:
    """Return whether an object may be read after a loop, also as a part of another one."""
    own = script.bound(meter.name, loop.loop)
    if "." in meter.name or not own or any(b.how == "parameter" for b in own):
        return True
    names = (meter.name, *holders(script, loop, meter.name))
    return any(uses(script, loop, name) for name in names)


def holders(script: Script, loop: TrainLoop, name: str) -> set[str]:
    """Return the names that are made with an object, such as that of a `ProgressMeter`."""
    scope = script.scope(loop.loop)
    return {
        b.name
        for b in script.assignments
        if script.scope(b.at) is scope and b.value is not None and name in names_in(b.value)
    }


def measures_time(script: Script, meter: Meter) -> bool:
    """Return whether an object averages times, which rank 0 measures for all ranks."""
    values = (script.value(arg.value) for call in meter.calls for arg in call.args)
    calls = (call for value in values for call in script.calls_in(value))
    return any(CLOCK.match(script.called(call)) for call in calls)


def starts_anew(
    script: Script, kind: Averager, name: str, at: cst.CSTNode, depth: int = DEPTH
) -> bool:
    """Return whether an object is empty each time when a loop, or a call that has one, begins."""
    function, loops = script.function(at), script.loops(at)
    own = [b for b in script.bound(name, at) if script.function(b.at) is function]
    resets = [
        call
        for call in script.calls
        if dotted(receiver(call)) == name
        and dotted(call.func).rpartition(".")[2] in kind.resets
        and script.function(call) is function
    ]
    made = [b.at for b in own if b.how == "assign" and _is_new(script, kind, b.value)]
    starts = [each for each in (*made, *resets) if script.loops(each) == loops]
    before = [each for each in starts if script.precedes(each, at)]
    if before:
        begin = max(script.start(each) for each in before)
    elif any(_ends_with(script, at, each) for each in resets if each in starts):
        begin = script.start(loops[0]) if loops else (0, 0)
    else:
        given = [b for b in own if b.how == "parameter"]
        return bool(given and depth) and _given_anew(script, kind, given[0], depth)
    between = (c for c in script.calls if begin < script.start(c) < script.start(at))
    return not any(_may_add(script, kind, name, call) for call in between)


def _is_new(script: Script, kind: Averager, value: cst.BaseExpression | None) -> bool:
    """Return whether an expression makes an object of a class."""
    owner = script.class_of(kind.update)
    return isinstance(value, cst.Call) and script.own_class(value) is owner


def _ends_with(script: Script, at: cst.CSTNode, reset: cst.Call) -> bool:
    """Return whether a reset follows in each round of the loop around a node."""
    loops = script.loops(at)
    leaves = (n for n in script.nodes if isinstance(n, cst.Continue))
    return (
        bool(loops)
        and script.start(reset) > script.start(at)
        and not any(script.loops(n)[:1] == loops[:1] for n in leaves)
        and {b.node for b in script.branches(reset)} <= {b.node for b in script.branches(at)}
        and not script.exclusive(at, reset)
    )


def _given_anew(script: Script, kind: Averager, parameter: Binding, depth: int) -> bool:
    """Return whether each call of a function passes an object that is empty."""
    function = script.function(parameter.at)
    calls = script.calls_of(function)
    index = parameter.index - (function is not None and script.class_of(function) is not None)
    for call in calls:
        given = argument(call, parameter.name, index)
        anew = dotted(given) and starts_anew(script, kind, dotted(given), call, depth - 1)
        if not (anew or _is_new(script, kind, given)):
            return False
    return bool(calls)


def _may_add(script: Script, kind: Averager, name: str, call: cst.Call) -> bool:
    """Return whether a call updates an object, or passes it to a function that may do so."""
    if dotted(receiver(call, kind.update.name.value)) == name:
        return True
    function = script.definition(call)
    passed = any(dotted(arg.value) == name for arg in call.args)
    return passed and function is not None and function.name.value != "__init__"


def is_ratio(plan: Plan, loop: TrainLoop, meter: Meter, complete_too: bool) -> bool:
    """Return whether only the ratio of sum and count is used, or sums over all samples."""
    total, count = (f"{meter.name}.{each[5:]}" for each in (meter.kind.total, meter.kind.count))
    if complete_too and (uses(plan.script, loop, total) or uses(plan.script, loop, count)):
        return False
    by = [d for d in divisors(plan.script, loop, total) if dotted(d) != count]
    return all(counts(plan, loop, each, {}) == "all" for each in by)


def is_alike(script: Script, loop: TrainLoop, meter: Meter) -> bool:
    """Return whether the sum has one type on all ranks: without an update, it is still a number."""
    if _is_number(script, meter, meter.kind.total):
        return True
    scope, counter = script.scope(loop.loop), _counter(script, loop)
    own = {
        b.name
        for (owner, _), several in script.bindings.items()
        for b in several
        if owner is scope and loop.loop in script.ancestors(b.at) and b.name != counter
    }
    return any(
        not any(
            loop.loop in script.ancestors(branch.node) and names_in(branch.test) & own
            for branch in script.branches(call)
        )
        for call in meter.calls
    )


def _counter(script: Script, loop: TrainLoop) -> str:
    """Return the name by which a loop counts its batches, "" if it has none."""
    if not isinstance(loop.loop, cst.For):
        return ""
    target, over = loop.loop.target, script.code(loop.loop.iter)
    if isinstance(target, cst.Tuple) and "enumerate(" in over:
        return dotted(target.elements[0].value)
    return dotted(target) if "range(" in over else ""


def summing(script: Script, loop: TrainLoop, several: Sequence[Meter]) -> list[str]:
    """Return the lines that sum over the ranks what objects of one class have summed."""
    kind, name = several[0].kind, several[0].name
    if len(several) > 1:
        name = _fresh_name(script, loop)
    own = f"{name}."
    lines = []
    for attribute in (kind.total, kind.count):
        known = all(_is_number(script, meter, attribute) for meter in several)
        value = attribute.replace("self.", own)
        lines += sum_over_ranks(script, value, "number" if known else "either")
    computed = [
        f"{each} = {script.code(value)}".replace("self.", own)
        for each, value in kind.derived.items()
    ]
    if computed and any(_may_be_empty(script, loop, meter) for meter in several):
        count = kind.count.replace("self.", own)
        computed = [f"if {count}:", *(f"    {each}" for each in computed)]
    lines += computed
    if len(several) == 1:
        return lines
    names = ", ".join(meter.name for meter in several)
    return [f"for {name} in ({names}):", *(f"    {line}" for line in lines)]


def _fresh_name(script: Script, loop: TrainLoop) -> str:
    """Return a name for an object that the function of a loop does not use yet."""
    nodes = script.inside(script.scope(loop.loop))
    used = {node.value for node in nodes if isinstance(node, cst.Name)}
    names = (f"meter{number or ''}" for number in itertools.count())
    return next(name for name in names if name not in used)


def _is_number(script: Script, meter: Meter, attribute: str) -> bool:
    """Return whether an attribute is certainly a number of Python."""
    return all(_adds_number(script, meter, each) for each in meter.kind.added[attribute])


def _adds_number(
    script: Script, meter: Meter, value: cst.BaseExpression, depth: int = DEPTH
) -> bool:
    """Return whether a value that a method adds is a number for each call of a loop."""
    made = script.value(value)
    if isinstance(made, cst.BinaryOperation) and depth:
        parts = (made.left, made.right)
        return all(_adds_number(script, meter, each, depth - 1) for each in parts)
    parameters = _parameters(script, meter.kind.update)
    parameter = next((b for b in parameters if b.name == dotted(made)), None)
    if parameter is None:
        return type_of(script, made) == "number"
    passed = [argument(c, parameter.name, parameter.index - 1) for c in meter.calls]
    given = [each if each is not None else parameter.value for each in passed]
    is_count = parameter.name in {dotted(each) for each in meter.kind.added[meter.kind.count]}
    kinds = (type_of(script, each) if each is not None else "tensor" for each in given)
    return all(kind == "number" or (is_count and not kind) for kind in kinds)


def _may_be_empty(script: Script, loop: TrainLoop, meter: Meter) -> bool:
    """Return whether the count may be 0 after a loop: it depends on conditions."""
    updates = (b.node for call in meter.calls for b in script.branches(call))
    kind = meter.kind
    changes = (kind.derived.values(), *kind.added.values())
    return any(loop.loop in script.ancestors(node) for node in updates) or any(
        script.branches(value) for values in changes for value in values
    )
