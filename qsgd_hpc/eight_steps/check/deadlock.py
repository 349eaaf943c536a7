"""Collectives that some ranks never call: the job hangs."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Finding
from qsgd_hpc.eight_steps.check.reach import complementary, differs, left_before
from qsgd_hpc.eight_steps.reading import Branch

__all__ = ["check"]


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the collectives that not all ranks call."""
    script = facts.script
    for call in script.calls:
        name = facts.collective(call)
        own = script.definition(call)
        inner = facts.collective_functions.get(own, "") if own is not None else ""
        if not name and not inner:
            continue
        for each in script.branches(call):
            if (
                differs(script, each.test)
                and not facts.reaches_collective_beside(each)
                and not in_turns(facts, each)
            ):
                yield alone(facts, call, name, inner, each)
                break
        else:
            yield from left(facts, call, name or inner)


def in_turns(facts: Facts, branch: Branch) -> bool:
    """Return whether the other ranks reach a collective in a separate `if`, before or after.

    Then one rank works first: `if rank != 0: barrier()`, the work, `if rank == 0: barrier()`.
    """
    script, node = facts.script, branch.node
    if not isinstance(node, cst.If) or not branch.taken:
        return False
    block = script.parents.get(node)
    for other in script.nodes:
        if (
            isinstance(other, cst.If)
            and other is not node
            and script.parents.get(other) is block
            and complementary(script, node.test, other.test)
            and facts.reaches_collective(other.body)
        ):
            return True
    return False


def alone(facts: Facts, call: cst.Call, name: str, inner: str, branch: Branch) -> Finding:
    condition = facts.script.code(branch.test)
    line = facts.script.line(branch.test)
    where = f"runs only where {'' if branch.taken else 'not '}{condition} (line {line})"
    called = facts.script.code(call.func)
    if name:
        return facts.finding("QH901", call, f"{called} {where}; the other ranks never call it")
    reason = f"{called} calls {inner} and {where}; the other ranks never reach it"
    return facts.finding("QH902", call, reason)


def left(facts: Facts, call: cst.Call, name: str) -> Iterator[Finding]:
    script = facts.script
    for each in left_before(script, call):
        if facts.reaches_collective(each):
            continue
        reason = (
            f"where {script.code(each.test)} (line {script.line(each)}) ranks leave before {name}"
        )
        yield facts.finding("QH903", call, reason)
        return
