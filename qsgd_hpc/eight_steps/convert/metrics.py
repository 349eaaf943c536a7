"""Step 8: sums of a loop over its batches become sums over all ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, sources
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import (
    DEPTH,
    Framework,
    Script,
    dotted,
    is_literal,
    names_in,
    receiver,
)

__all__ = ["average_metrics"]

# NUMBER matches the function that a value calls; CONVERTED, any part of the value's text.
CONVERTED = re.compile(r"\.(item|numpy|tolist)\(|(?<![\w.])(float|int)\(|\.shape\[-?\d\]$")
NUMBER = re.compile(
    r"(?<!tensorflow)\.(item|numpy|tolist|size|numel)$|^(float|int|len|round)$|^(math|numpy)\."
)
METER = re.compile(r"Meter|Metric|Average|Accuracy|(^|[._])Mean$")
CURVE = re.compile(r"\.(plot|semilog[xy]|loglog)$")
PARTS = re.compile(r"\.(DataLoader|DistributedSampler)$")  # have the length of a rank's part
MADE = re.compile(
    r"^(?!numpy\.).*(zeros|zeros_like|tensor|constant|Variable|array|as_tensor|full)$"
)
# Methods of tensors that return tensors; arrays of NumPy have some of them, too.
TENSOR = re.compile(
    r"^(abs|clone|cpu|cuda|detach|div|double|exp|float|int|long|mean|mul|norm|sqrt|square|sum|to)$"
)


@dataclass(frozen=True, eq=False)
class Sum:
    """A name to which a loop adds.

    Attributes:
        kind: "count" (the same on every rank, such as batches), "list" (appended to), "tensors" (a
            list that may have some), "tensor", "number" (of Python), or "either" of both.
        start: its value before the loop.
    """

    name: str
    kind: str
    start: cst.BaseExpression

    @property
    def is_list(self) -> bool:
        """Whether the loop appends to it."""
        return self.kind in ("list", "tensors")


def additions(script: Script, loop: TrainLoop) -> Iterator[tuple[str, cst.BaseExpression, bool]]:
    """Yield the name, the added value, and whether it is appended to a list."""
    for node in script.inside(loop.loop.body):
        if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
            yield dotted(node.target), node.value, False
        elif isinstance(node, cst.Call) and receiver(node, "append") and len(node.args) == 1:
            yield dotted(receiver(node)), node.args[0].value, True


def sums(plan: Plan, loop: TrainLoop, numbers: bool = False) -> tuple[Sum, ...]:
    """Return the sums of a loop that start at their initial value and are used after the loop.

    Args:
        plan: the plan of the script.
        loop: the loop.
        numbers: whether the script computes with numbers only, as those that a session returns.
    """
    script = plan.script
    found: dict[str, Sum] = {}
    for name, added, is_list in additions(script, loop):
        start = fresh(script, loop, name)
        if not name or start is None or not uses(script, loop, name):
            continue
        if is_list:
            known = not in_torch(script) or type_of(script, added) == "number"
            kind = "list" if known else "tensors"
        elif is_literal(added):
            kind = "count"
        elif numbers:
            kind = "number"
        elif MADE.search(script.called(start)):
            kind = "tensor"
        else:
            kind = type_of(script, added) or ("either" if in_torch(script) else "tensor")
        found.setdefault(name, Sum(name, kind, start))
    return tuple(found.values())


def meters(script: Script, loop: TrainLoop) -> dict[str, None]:
    """Return the objects that a loop updates with its batches and that are read after it."""
    found: dict[str, None] = {}
    for call in script.calls_in(loop.loop.body):
        meter = receiver(call)
        made = script.value(meter) if meter is not None and call.args else None
        if METER.search(script.called(made)):
            name = dotted(meter)
            if name and uses(script, loop, name):
                found[name] = None
    return found


def type_of(script: Script, node: cst.CSTNode, depth: int = DEPTH) -> str:
    """Return what a value is, as far as the text shows.

    Returns:
        "number" (of Python or NumPy), "tensor" (the result of any other call; in PyTorch, of one
        that certainly returns a tensor), "either" (of both), or "" for a name without a known
        value.
    """
    value = script.value(node)
    if isinstance(value, cst.BinaryOperation) and depth:
        parts = {
            type_of(script, part, depth - 1)
            for part in (value.left, value.right)
            if not is_literal(script.value(part))
        }
        return "either" if parts >= {"number", "tensor"} or "either" in parts else "".join(parts)
    known = is_literal(value) or NUMBER.search(script.called(value))
    if known or CONVERTED.search(script.code(value)):
        return "number"
    if not in_torch(script):
        return "tensor" if isinstance(value, cst.Call) else ""
    if isinstance(value, cst.Call):
        return "tensor" if _is_tensor(script, value, depth) else "either"
    found = script.binding(value) if dotted(value) else None
    if found is not None and found.how == "part" and isinstance(found.value, cst.Call):
        return "number" if NUMBER.search(script.called(found.value)) else "either"
    return ""


def in_torch(script: Script) -> bool:
    """Return whether the script trains with PyTorch, and with no other framework."""
    return script.frameworks == {Framework.TORCH}


def _is_tensor(script: Script, call: cst.Call, depth: int) -> bool:
    """Return whether a call of a PyTorch script certainly returns a tensor.

    An unknown function, such as one for the accuracy, often returns a number.
    """
    if script.called(call).startswith("torch."):
        return True
    if any(base.endswith("Module") for base in script.bases(call.func)):
        return True
    owner = receiver(call)
    if owner is None or script.definition(call) is not None or not depth:
        return False
    name = cst.ensure_type(call.func, cst.Attribute).attr.value
    names = (n for n in script.inside(owner) if isinstance(n, cst.Name))
    return bool(TENSOR.match(name)) and all(
        type_of(script, each, depth // 2) != "number" for each in names
    )


def fresh(script: Script, loop: TrainLoop, name: str) -> cst.BaseExpression | None:
    """Return the initial value of a name before each loop; None if it keeps its last value."""
    place, known = script.start(loop.loop), script.bound(name, loop.loop)
    before = [b for b in known if script.end(b.at) <= place and b.how == "assign"]
    if not before or before[-1].value is None:
        return None
    if loop.epochs is not None and loop.epochs not in script.ancestors(before[-1].at):
        return None
    if script.function(before[-1].at) is not script.function(loop.loop):
        return None
    return before[-1].value


def uses(script: Script, loop: TrainLoop, name: str) -> list[cst.CSTNode]:
    """Return the uses of a name in the same function after the loop."""
    end, scope = script.end(loop.loop), script.scope(loop.loop)
    kind = cst.Attribute if "." in name else cst.Name
    return [
        n
        for n in script.nodes
        if isinstance(n, kind)
        and dotted(n) == name
        and script.start(n) >= end
        and script.scope(n) is scope
    ]


def is_curve(script: Script, loop: TrainLoop, name: str) -> bool:
    """Return whether a list has a value for each batch, in order: it is plotted behind the loop."""
    around = (node for use in uses(script, loop, name) for node in script.ancestors(use))
    return any(CURVE.search(script.called(node)) for node in around)


def divisors(script: Script, loop: TrainLoop, name: str) -> list[cst.BaseExpression]:
    """Return the divisors of a name after the loop."""
    found = []
    for node in uses(script, loop, name):
        for around in (node, *script.ancestors(node)):
            if isinstance(around, cst.BinaryOperation) and isinstance(around.operator, cst.Divide):
                if around.left is node or around.left in script.ancestors(node):
                    found.append(around.right)
            elif isinstance(around, cst.AugAssign) and isinstance(
                around.operator, cst.DivideAssign
            ):
                if around.target is node:
                    found.append(around.value)
            elif isinstance(around, cst.BaseStatement):
                break
    return found


def inner_divisors(script: Script, loop: TrainLoop, name: str) -> list[cst.BaseExpression]:
    """Return the divisors of what a loop adds to a name, except those of single batches."""
    moving = moved(script, loop)
    return [
        node.right
        for target, added, is_list in additions(script, loop)
        if target == name and not is_list
        for node in script.inside(added)
        if isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, cst.Divide)
        and not (is_literal(node.right) or names_in(node.right) & moving)
    ]


def moved(script: Script, loop: TrainLoop) -> set[str]:
    """Return the names that a loop binds to each of its batches."""
    if not isinstance(loop.loop, cst.For):
        return set()
    return {dotted(n) for n in script.inside(loop.loop.target)} - {""}


def counts(
    plan: Plan, loop: TrainLoop, node: cst.BaseExpression, known: dict[str, Sum], depth: int = DEPTH
) -> str:
    """Return what a divisor counts: "batches" of this rank, samples of "all" ranks, or ""."""
    script = plan.script
    read = names_in(node)
    summed = [known[name] for name in read if name in known]
    if summed:
        return "batches" if all(s.kind == "count" for s in summed) else "all"
    here = script.scope(node) is script.scope(loop.loop)
    beside = here and script.start(node) > script.start(loop.loop)  # not a name of a comprehension
    if is_literal(node) or (beside and read & moved(script, loop)):
        return "batches"
    over = iterable(script, loop.loop)
    if over is not None and script.code(over) == f"range({script.code(node)})":
        return "batches"
    own = {dotted(s) for s in (over, *(sources(script, over) if over else ())) if s} - {""}
    for part in script.inside(node):
        if isinstance(part, cst.Call) and script.called(part) == "len":
            what = part.args[0].value
            loads = bool(PARTS.search(script.called(script.value(what))))
            name = dotted(what)
            same = over is not None and script.code(what) == script.code(over)
            local = same or name in own | plan.arrays or loads or "batch" in name
            return "batches" if local or name.endswith(".sampler") else "all"
        if isinstance(part, cst.Attribute) and part.attr.value in ("shape", "size"):
            return "batches" if dotted(part.value) in plan.arrays else "all"
    # A count in a dictionary is one of those that it is made from.
    made = script.value(node.value if isinstance(node, cst.Subscript) else node)
    if made is not node and isinstance(made, cst.BaseExpression) and depth:
        return counts(plan, loop, made, known, depth - 1)
    if dotted(node) or not depth:
        return ""
    parts = [
        n
        for n in script.inside(node)
        if isinstance(n, cst.Name) and not is_literal(script.value(n))
    ]
    kinds = {counts(plan, loop, part, known, depth - 1) for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


def average_metrics(
    plan: Plan,
    loop: TrainLoop,
    complete_too: bool = False,
    *,
    numbers: bool = False,
    summed: Collection[str] = (),
    also: Iterable[str] = (),
    when: str = "",
) -> None:
    """Sum the sums of a loop over the ranks, immediately after the loop.

    Args:
        plan: the plan to extend.
        loop: a loop over a rank's own batches.
        complete_too: whether the same loop also iterates over data that every rank has completely.
        numbers: whether the script computes with numbers only.
        summed: names of metrics that are summed otherwise.
        also: lines that do so.
        when: the condition under which the batches are a rank's own, as Python code; "": always.
    """
    script = plan.script
    found = {each.name: each for each in sums(plan, loop, numbers)}
    partial = [name for name in meters(script, loop) if name not in summed]
    lines = []
    for each in found.values():
        if each.kind == "count":
            continue
        kinds = {counts(plan, loop, d, found) for d in divisors(script, loop, each.name)}
        added = inner_divisors(script, loop, each.name)
        kinds |= {counts(plan, loop, d, found) for d in added} - {""}
        by = kinds.pop() if len(kinds) == 1 else ("all" if not kinds else "")
        paired = any(
            known in names_in(d) for d in divisors(script, loop, each.name) for known in found
        )
        if (
            not by
            or (complete_too and by == "all" and not paired)
            or (each.is_list and by == "batches")
        ):
            partial.append(each.name)
            continue
        curve = each.is_list and is_curve(script, loop, each.name)
        lines += sum_over_ranks(script, each.name, each.kind, "curve" if curve else by)
    lines += also
    for name in partial:
        plan.todo(loop.loop, words.PARTIAL.format(name=name))
    if lines:
        text = "Every rank has summed over its own shard; now sum over all ranks."
        lines = [f"if {when}:", *(f"    {each}" for each in lines)] if when else lines
        plan.after(loop.loop, *plan.comment(8, text, loop.loop), *lines)


def sum_over_ranks(script: Script, name: str, kind: str, by: str = "all") -> list[str]:
    """Return the lines that sum over the ranks, or average if the divisor is of "batches"."""
    torch = script.name_of("torch") or ("torch" if in_torch(script) else "")
    # Tensors of several GPUs, as objects, could not be summed or stacked.
    on_cpu = f"{name} = [v.detach().cpu() if {torch}.is_tensor(v) else v for v in {name}]"
    before = [on_cpu] if kind == "tensors" else []
    if by == "curve":
        mean = f"[sum(v) / hvd.size() for v in zip(*hvd.allgather_object({name}))]"
        return [*before, f"{name} = {mean}"]
    if kind in ("list", "tensors"):
        return [*before, f"{name} = sum(hvd.allgather_object({name}), [])"]
    mean = " / hvd.size()" if by == "batches" else ""
    number = f"{name} = sum(hvd.allgather_object({name})){mean}"
    tensor = f"{name} = hvd.allreduce({name}, op=hvd.{'Sum' if by == 'all' else 'Average'})"
    if kind == "either" and torch:
        return [f"if {torch}.is_tensor({name}):", f"    {tensor}", "else:", f"    {number}"]
    return [tensor if kind == "tensor" else number]
