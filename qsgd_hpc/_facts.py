"""What a framework's graph keeps of a collective: all but the tensor's shape and type."""

from __future__ import annotations

from typing import Any

from qsgd_hpc.compression import Coding, facts_of
from qsgd_hpc.ops import Group, Op, Sum
from qsgd_hpc.process_sets import ProcessSet, require_member

__all__ = ["operation_facts"]


def operation_facts(
    kind: str,
    name: str,
    process_set: ProcessSet,
    *,
    op: Op = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    coding: Coding | None = None,
    lasting: bool = False,
    check_finite: bool = False,
    group: Group | None = None,
    root_rank: int = 0,
) -> dict[str, Any]:
    """Return the arguments of ``_core.operation_facts``.

    Args:
        kind: allreduce, broadcast, allgather, alltoall or reducescatter.
        name: of the operation, equal on every rank; "" has the engine number it, which is right
            where every rank calls in one order.
        process_set: the ranks that take part.
        lasting: whether the name comes again.
        check_finite: whether NaN or Inf in the result is an error.
        group: of operations that end together; its name does not matter if ``name`` is "".
    Raises:
        UsageError: this rank is not in the set, or not initialised.
    """
    return {
        "kind": kind,
        "name": name,
        "op": op.name,
        "prescale": prescale,
        "postscale": postscale,
        **facts_of(coding),
        "lasting": lasting,
        "check_finite": check_finite,
        "process_set": require_member(process_set),
        "group": group.name if group else "",
        "group_size": group.size if group else 0,
        "root": root_rank,
    }
