"""Gradients that are reduced together, and gradients that are submitted together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.pending import BATCH_BYTES

__all__ = ["batches", "choose_groups", "partition"]


def choose_groups(num_groups: int, groups: Any) -> Any:
    """Return ``groups``, or the older ``num_groups`` if that is given instead.

    Raises:
        UsageError: both are given, or neither lists nor a whole number from 0.
    """
    if num_groups and groups is not None:
        raise UsageError("pass groups= or the deprecated num_groups=, not both")
    chosen = num_groups if groups is None else groups
    lists = isinstance(chosen, Iterable) and not isinstance(chosen, str)
    if not lists and (not isinstance(chosen, int) or chosen < 0):
        raise UsageError(f"groups={chosen!r}: choose 0 (none) or more, or a list of lists")
    return chosen


def partition(parameters: Sequence[Any], groups: int | Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the parameters of each group; those without a group are reduced separately.

    Args:
        parameters: all of them, in an order that is equal on every rank.
        groups: number of groups of consecutive parameters, nearly equal in size; or the groups.
    Raises:
        UsageError: a parameter in two groups, or one that is not among ``parameters``.
    """
    if isinstance(groups, int):
        return _runs(parameters, min(groups, len(parameters)))
    known = {id(p) for p in parameters}
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for member in group:
            if id(member) not in known:
                raise UsageError(f"groups[{number}] has a tensor that the optimizer does not have")
            if id(member) in seen:
                raise UsageError(
                    f"groups[{number}] has a parameter that is in another group or listed twice"
                )
            seen.add(id(member))
    return [list(group) for group in groups if group]


def _runs(parameters: Sequence[Any], number: int) -> list[list[Any]]:
    cuts = [len(parameters) * i // number for i in range(number + 1)] if number else []
    return [list(parameters[a:b]) for a, b in itertools.pairwise(cuts)]


def batches(sizes_bytes: Iterable[int]) -> list[list[int]]:
    """Return which gradients to submit together in one call.

    A batch is submitted once it has ``BATCH_BYTES``; larger batches would begin too late to overlap
    with the rest of the backward pass.

    Args:
        sizes_bytes: sizes of the gradients, in the order in which they become ready.
    Returns:
        for each batch, the positions of its gradients; each position once, in order.
    """
    made: list[list[int]] = []
    waiting_bytes = BATCH_BYTES
    for position, size_bytes in enumerate(sizes_bytes):
        if waiting_bytes >= BATCH_BYTES:
            made.append([])
            waiting_bytes = 0
        made[-1].append(position)
        waiting_bytes += size_bytes
    return made
