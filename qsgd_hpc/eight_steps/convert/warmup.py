"""The number of steps per epoch, and where a script can compute it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import body_of, names_in, position_of
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, range_of, split_of
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, argument, dotted

__all__ = ["Steps", "steps_of"]


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of an epoch.

    Attributes:
        counts: expressions for their number, each with the names in it.
        torch: the script's name for torch; used for PyTorch only.
    """

    counts: tuple[tuple[str, frozenset[str]], ...]
    torch: str = "torch"

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
    scope = script.scope(statement)
    if name.startswith("self."):
        owner = script.class_of(statement)
        own = script.bindings.get((owner, name), ()) if owner is not None else ()
    else:
        own = script.bindings.get((scope, name), ())
    if not own:
        elsewhere = script.bindings.get((script.module, name), ())
        return statement if elsewhere and scope is not script.module else None
    if any(b.how == "parameter" or script.end(b.at) <= script.end(statement) for b in own):
        return statement
    body = body_of(script, statement)
    place = position_of(script, own[0].at, body)
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
        function = script.function(loop.loop)
        for call in script.calls:
            if script.definition(call) is function and function is not None:
                method = script.class_of(function) is not None
                given = argument(call, bound.name, bound.index - method)
                if given is not None and dotted(given):
                    yield dotted(given)


def steps_of(
    script: Script,
    loops: Sequence[TrainLoop],
    loaders: Sequence[str],
    torch: str = "torch",
    loaded: bool = False,
) -> Steps:
    """Return the expressions for the number of batches of a rank in an epoch."""
    counts = [(f"len({name})", frozenset({name})) for name in loaders]
    for each in loops if counts or loaded else ():
        over = set(_names_along(script, each))
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
    return Steps(tuple(counts), torch)
