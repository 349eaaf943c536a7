"""Facts of a script that the rules use; each is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from qsgd_hpc.eight_steps.check.finding import BY_ID, Edit, Finding, Severity
from qsgd_hpc.eight_steps.check.helpers import Helpers, api_names, helpers
from qsgd_hpc.eight_steps.check.reach import Reach, guarded, left_before, reach
from qsgd_hpc.eight_steps.reading import Branch, Framework, Loop, Script, argument

__all__ = ["COLLECTIVES", "Event", "Facts", "facts", "trace"]

COLLECTIVES = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
    for prefix in ("", "grouped_", "sparse_")
    for suffix in ("", "_", "_async", "_async_", "_object", "_object_fn")
) | {
    "allreduce_gradients",
    "barrier",
    "broadcast_global_variables",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_variables",
}
# join is not among them: other ranks continue while it waits.


@dataclass(frozen=True, eq=False)
class Facts:
    """A script, its helpers, and facts derived from both."""

    script: Script
    helpers: Helpers

    @cached_property
    def api(self) -> frozenset[str]:
        """All names of Horovod's API in the script and its helpers."""
        return api_names(self.script) | self.helpers.names

    def uses(self, *names: str) -> bool:
        """Return whether the script or a helper mentions one of these names of Horovod's API."""
        return any(name in self.api for name in names)

    def mentions(self, *names: str) -> bool:
        """Return whether one of these names is anywhere in the script or a helper."""
        return any(name in self._names or name in self.helpers.plain for name in names)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(n.value for n in self.script.nodes if isinstance(n, cst.Name))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The calls of one run, in order."""
        return trace(self.script)

    @cached_property
    def called(self) -> dict[cst.Call, str]:
        """The dotted name of the function of each call."""
        return {call: self.script.called(call) for call in self.script.calls}

    def method(self, call: cst.Call) -> str:
        """Return the last part of the called function's name: "step"."""
        func = call.func
        if isinstance(func, cst.Attribute):
            return func.attr.value
        return func.value if isinstance(func, cst.Name) else ""

    def is_training(self, call: cst.Call) -> bool:
        """Return whether a call is a training step, or a fit."""
        kinds, method, name = self.script.frameworks, self.method(call), self.called[call]
        if Framework.TORCH in kinds and method == "backward" and is_method(call):
            return True
        if Framework.KERAS in kinds and method in ("fit", "fit_generator", "train_on_batch"):
            return is_method(call)
        if Framework.TF2 in kinds and method in ("apply_gradients", "apply"):
            return is_method(call)
        if Framework.TF1 in kinds and method == "run" and is_method(call):
            return "ession" in name or "sess" in name
        return Framework.JAX in kinds and name.endswith(("optax.apply_updates", "apply_gradients"))

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The positions of training calls among the events."""
        return tuple(i for i, each in enumerate(self.events) if self.is_training(each.call))

    @cached_property
    def trains(self) -> bool:
        """Whether the script trains when it runs, and is not a library of functions."""
        return bool(self.training)

    def calls(self, *names: str) -> tuple[cst.Call, ...]:
        """Return the script's calls of these names of Horovod's API, in order."""
        wanted = set(names)
        return tuple(c for c in self.script.calls if wanted & self.script.api_names(c))

    def places(self, *names: str) -> tuple[int, ...]:
        """Return the positions of the calls of these names of Horovod's API among the events."""
        wanted = set(self.calls(*names))
        return tuple(i for i, each in enumerate(self.events) if each.call in wanted)

    def reach(self, *starts: cst.CSTNode) -> Reach:
        """Return all that these expressions may depend on."""
        return reach(self.script, *starts)

    def guarded(self, event: Event) -> bool:
        """Return whether a call may be made by some ranks only."""
        if guarded(self.script, event.branches(self.script)):
            return True
        return any(next(left_before(self.script, site), None) for site in event.sites())

    @cached_property
    def collective_functions(self) -> dict[cst.FunctionDef, str]:
        """The script's own functions that call a collective, and its name."""
        found: dict[cst.FunctionDef, str] = {}
        for _ in range(len(self.script.calls) + 1):
            before = len(found)
            for call in self.script.calls:
                function = self.script.function(call)
                if function is not None and function not in found:
                    name = self.collective(call)
                    own = self.script.definition(call)
                    name = name or (found.get(own, "") if own is not None else "")
                    if name:
                        found[function] = name
            if len(found) == before:
                break
        return found

    def collective(self, call: cst.Call) -> str:
        """Return the name of a call's collective of all ranks, "" for other calls."""
        if argument(call, "process_set") is not None:
            return ""
        name = self.script.api(call)
        last = name.rpartition(".")[2]
        if last in COLLECTIVES and "()" not in name:
            return last
        return "step" if name == "DistributedOptimizer().step" else ""

    def reaches_collective(self, node: cst.CSTNode) -> str:
        """Return the name of a collective called in a node, also through own functions."""
        names = (self.collective_through(call) for call in self.script.calls_in(node))
        return next((name for name in names if name), "")

    def collective_through(self, call: cst.Call) -> str:
        """Return the name of the collective that a call, or the function it calls, runs."""
        own = self.script.definition(call)
        inner = self.collective_functions.get(own, "") if own is not None else ""
        return self.collective(call) or inner

    def reaches_collective_beside(self, branch: Branch) -> str:
        """Return the name of a collective on the other side of a condition, else ""."""
        node = branch.node
        if not isinstance(node, (cst.If, cst.IfExp)):
            return ""
        other = node.orelse if branch.taken else node.body
        if other is not None:
            return self.reaches_collective(other)
        # Without an else, the other side is the code after an `if` whose body leaves the block.
        for call in self.script.calls:
            name = self.collective_through(call)
            if name and any(node is each for each in left_before(self.script, call)):
                return name
        return ""

    def finding(
        self,
        id_: str,
        node: cst.CSTNode,
        reason: str,
        *,
        severity: Severity | None = None,
        edits: Iterable[Edit] = (),
        remedy: str = "",
        absent: bool = False,
    ) -> Finding:
        """Return a finding at the beginning of a node.

        Args:
            id_: id of the rule.
            node: its position.
            reason: the fault at this position.
            severity: replaces the rule's.
            edits: the edits that fix it.
            remedy: replaces the rule's.
            absent: whether it reports a missing step, which an unread module may contain.
        """
        kind = BY_ID[id_]
        level = severity or kind.severity
        if absent and self.helpers.unread:
            level = Severity.WARNING if level is Severity.ERROR else level
            modules = ", ".join(self.helpers.unread)
            reason += f" (not read: {modules}, which may do it)"
        line, column = self.script.start(node)
        alias = self.script.alias
        text = (remedy or kind.remedy).replace("hvd.", f"{alias}.")
        return Finding(kind, line, column + 1, reason, text, level, tuple(edits))


def is_method(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute)


def facts(script: Script) -> Facts:
    """Return the facts of a script for the rules; reads the modules next to it."""
    return Facts(script, helpers(script))


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
    """Return the calls that running a script makes, in order, including those inside its functions.

    An approximation: both branches of every condition are taken, and loops run once.
    """
    by_scope: dict[cst.FunctionDef | None, list[cst.Call]] = {}
    for call in script.calls:
        by_scope.setdefault(script.function(call), []).append(call)
    entered: dict[cst.FunctionDef, int] = {}
    count = 0

    def body(scope: cst.FunctionDef | None, through: tuple[cst.Call, ...]) -> Iterator[Event]:
        nonlocal count
        for call in by_scope.get(scope, ()):
            for function in functions_run(script, call):
                times = entered.get(function, 0)
                inside = any(function is script.definition(site) for site in through)
                if times < MOST_ENTRIES and not inside and count < MOST_EVENTS:
                    entered[function] = times + 1
                    yield from body(function, (*through, call))
            count += 1
            yield Event(call, through)

    return tuple(body(None, ()))


def functions_run(script: Script, call: cst.Call) -> Iterator[cst.FunctionDef]:
    """Yield the script's functions that a call runs: the called one, else those passed to it."""
    own = script.definition(call)
    if own is not None:
        yield own
    for each in call.args:
        if isinstance(each.value, (cst.Name, cst.Attribute)):
            given = script.definition(each.value)
            if given is not None and own is None:
                yield given
