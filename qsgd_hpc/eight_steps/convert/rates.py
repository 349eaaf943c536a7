"""Step 4: scaled learning rates, and the steps of an epoch for a warm-up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.loops import TrainLoop, batches_of, iterable, range_of, split_of
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, names_in

__all__ = ["Steps", "is_number", "scale", "scaled", "steps_of"]


def scaled(script: Script, rate: cst.BaseExpression) -> str:
    """Return the rate times the number of ranks, as Python code."""
    return f"{script.operand(rate)} * hvd.size()"


def scale(plan: Plan, rate: cst.BaseExpression) -> None:
    """Multiply a rate by the number of ranks, in place."""
    plan.replace(rate, scaled(plan.script, rate))


def is_number(script: Script, rate: cst.BaseExpression) -> bool:
    """Return whether a rate is a number, not a schedule, as far as the text shows."""
    name = script.called(script.value(rate))
    return "chedule" not in name and not name.endswith(("Decay", "Restarts", "decay"))


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of an epoch.

    Attributes:
        counts: expressions for their number, each with the names in it.
    """

    counts: tuple[tuple[str, frozenset[str]], ...]

    def at(
        self, plan: Plan, statement: cst.BaseStatement, later: bool = True
    ) -> tuple[cst.BaseStatement | None, str]:
        """Return the statement after which an expression can be computed, and the expression.

        Args:
            plan: the plan of the script.
            statement: the earliest possible statement.
            later: allow later statements of the same block.
        Returns:
            None and "" if there is no such statement.
        """
        for text, names in self.counts:
            place: cst.BaseStatement | None = statement
            for name in names:
                place = place and _known(plan.script, name, place, later)
            if place is not None:
                return place, text
        return None, ""


def _known(
    script: Script, name: str, statement: cst.BaseStatement, later: bool
) -> cst.BaseStatement | None:
    """Return the statement after which a name has its value: this one, or a later one."""
    scope, own = script.scope(statement), script.bound(name, statement)
    if not own:
        elsewhere = script.bindings.get((script.module, name), ())
        return statement if elsewhere and scope is not script.module else None
    if any(b.how == "parameter" or script.end(b.at) <= script.end(statement) for b in own):
        return statement
    body = script.block(statement)
    place = script.position(own[0].at, body)
    found = body[place] if later and place >= 0 else None
    if isinstance(found, cst.For | cst.While) or not isinstance(found, cst.BaseStatement):
        return None
    return found


def _names_along(script: Script, loop: TrainLoop) -> Iterator[str]:
    """Yield the name of a loop's iterable, and its names in the callers of the function."""
    over = iterable(script, loop.loop)
    if over is None or not dotted(over):
        return
    yield dotted(over)
    bound = script.binding(over)
    if bound is not None and bound.how == "parameter":
        yield from (dotted(given) for given in script.passed(bound) if dotted(given))


def steps_of(
    script: Script,
    loops: Sequence[TrainLoop],
    loaders: Sequence[str],
    loaded: bool = False,
    unsized: frozenset[str] = frozenset(),
) -> Steps:
    """Return the expressions for the number of batches of a rank in an epoch.

    Args:
        script: the script.
        loops: its training loops.
        loaders: names of the loaders for training.
        loaded: whether the loops iterate over loaders, perhaps by other names.
        unsized: names of objects without a length.
    """
    known = [name for name in loaders if name not in unsized]
    counts = [(f"len({name})", frozenset({name.partition("[")[0]})) for name in known]
    for each in loops if counts or loaded else ():
        over = set(_names_along(script, each)) - unsized
        counts += [(f"len({name})", frozenset({name})) for name in sorted(over)]
    for each in loops:
        found = range_of(script, each.loop) or split_of(script, each.loop)
        if found is not None:
            end, step = (script.code(part) for part in found)
            names = (names_in(found[0]) | names_in(found[1])) - {"len", "self"}
            tops = {n for n in names if "." not in n or n.startswith("self.")}
            divisor = step if step.isidentifier() or step.isdigit() else f"({step})"
            dividend = end if re.fullmatch(r"\w+|len\([\w.]+\)", end) else f"({end})"
            counts.append((f"max(1, {dividend} // {divisor})", frozenset(tops)))
        elif (number := batches_of(script, each.loop)) is not None:
            tops = {n for n in names_in(number) - {"len", "self"} if "." not in n}
            counts.append((f"max(1, {script.code(number)})", frozenset(tops)))
    return Steps(tuple(counts))
