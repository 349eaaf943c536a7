"""The order of a script's calls, including those inside its own functions.

An approximation of a run: both branches of every condition are taken, and loops run once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.reading import Branch, Loop, Script

__all__ = ["Event", "trace"]

MOST_ENTRIES = 3  # most entries into one function; later calls of it are not followed
MOST_EVENTS = 20_000


@dataclass(frozen=True, eq=False)
class Event:
    """One call, and the calls of the script's functions that led to it, the outermost first."""

    call: cst.Call
    through: tuple[cst.Call, ...]

    def sites(self) -> tuple[cst.Call, ...]:
        """Return the call and those that led to it, the innermost first."""
        return (self.call, *reversed(self.through))

    def loops(self, script: Script) -> tuple[Loop, ...]:
        """Return all loops that repeat it, the innermost first."""
        return tuple(loop for site in self.sites() for loop in script.loops(site))

    def branches(self, script: Script) -> tuple[Branch, ...]:
        """Return all conditions it depends on, the innermost first."""
        return tuple(branch for site in self.sites() for branch in script.branches(site))


def trace(script: Script) -> tuple[Event, ...]:
    """Return the calls that running a script makes, in order."""
    by_scope: dict[cst.FunctionDef | None, list[cst.Call]] = {}
    for call in script.calls:
        by_scope.setdefault(script.function(call), []).append(call)
    entered: dict[cst.FunctionDef, int] = {}
    count = 0

    def body(scope: cst.FunctionDef | None, through: tuple[cst.Call, ...]) -> Iterator[Event]:
        nonlocal count
        for call in by_scope.get(scope, ()):
            for function in targets(script, call):
                times = entered.get(function, 0)
                inside = any(function is script.definition(site) for site in through)
                if times < MOST_ENTRIES and not inside and count < MOST_EVENTS:
                    entered[function] = times + 1
                    yield from body(function, (*through, call))
            count += 1
            yield Event(call, through)

    return tuple(body(None, ()))


def targets(script: Script, call: cst.Call) -> Iterator[cst.FunctionDef]:
    """Yield the script's functions that a call runs: the called one, else those passed to it."""
    own = script.definition(call)
    if own is not None:
        yield own
    for each in call.args:
        if isinstance(each.value, (cst.Name, cst.Attribute)):
            given = script.definition(each.value)
            if given is not None and own is None:
                yield given
