"""An optimizer's parameters: their names, and its claims on those that optimizers share."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from qsgd_hpc.errors import UsageError

__all__ = ["Claim", "name_parameters", "parameters_of", "plain_name"]

_NUMBERS = itertools.count()
_CLAIMS: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()  # oldest first
_LEFT: list[Claim] = []
"""Claims of deleted optimizers with reductions in flight, for which other ranks wait."""
# Modules by which torch.compile and activation checkpointing wrap others.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class Claim:
    """The parameters of an optimizer, and the other optimizers that share them.

    A gradient is reduced once, by the rules of the optimizer whose ``step`` is next, which
    a backward pass cannot know. A shared parameter's gradient is therefore reduced in ``step``.

    Args:
        optimizer: the owner of this claim, which keeps it alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # By id: hashing a tensor calls Python code, and every gradient is looked up here.
        self._parameters: dict[int, torch.Tensor] = {}
        self._rivals: dict[int, list[weakref.ref[Claim]]] = {}
        self.dropped = False
        """Whether the optimizer has been deleted."""
        _CLAIMS[next(_NUMBERS)] = self
        weakref.finalize(optimizer, self._drop).atexit = False

    def _drop(self) -> None:
        self.dropped = True
        if self.begun:
            _LEFT.append(self)

    def claim(self, parameters: Iterable[torch.Tensor]) -> None:
        """Claim parameters, after completing reductions that other optimizers have begun with them.

        Call it on every rank, because completing a reduction is collective.
        """
        new = {id(p): p for p in parameters if id(p) not in self._parameters}
        if not new:
            return
        for other in [each for each in _CLAIMS.values() if each is not self]:
            common = new.keys() & other._parameters.keys()
            if common:
                other.complete_pending()
                self._share(common, other)
        self._parameters |= new

    def _share(self, parameters: Iterable[int], other: Claim) -> None:
        if other in _LEFT:
            _LEFT.remove(other)
        if other.dropped:
            return
        for parameter in parameters:
            self._rivals.setdefault(parameter, []).append(weakref.ref(other))
            other._rivals.setdefault(parameter, []).append(weakref.ref(self))

    def is_shared(self, parameter: torch.Tensor) -> bool:
        """Return whether another existing optimizer also uses this parameter."""
        if not self._rivals:  # almost always, and queried for every gradient
            return False
        rivals = (rival() for rival in self._rivals.get(id(parameter), ()))
        return any(rival is not None and not rival.dropped for rival in rivals)

    @property
    def begun(self) -> bool:
        """Whether there are reductions in flight that ``complete_pending`` must complete."""
        return False

    def complete_pending(self) -> None:
        """Complete the parameters' reductions in flight; collective."""


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts of wrappers, as rules and checkpoints know it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def name_parameters(
    owned: Sequence[torch.Tensor], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return a name for each of the optimizer's parameters, and those given for others.

    The optimizer may get the others later, by ``add_param_group``.

    Args:
        owned: the optimizer's parameters.
        named_parameters: names for these and possibly other parameters; None numbers them.
    Raises:
        UsageError: names are duplicated or missing, or there are no pairs.
    """
    if named_parameters is None:
        return {p: str(i) for i, p in enumerate(owned)}
    listed = list(named_parameters)
    if any(isinstance(p, str) or not isinstance(p, Sequence) or len(p) != 2 for p in listed):
        raise UsageError(
            "named_parameters takes pairs of name and parameter: pass "
            "model.named_parameters(), not model.parameters() or a dict"
        )
    pairs = [(plain_name(name), parameter) for name, parameter in listed]
    doubled = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
    if doubled:
        raise UsageError(f"named_parameters contains duplicate names: {', '.join(doubled)}")
    names = {parameter: name for name, parameter in pairs}
    lost = [tuple(p.shape) for p in owned if p not in names]
    if lost:
        raise UsageError(
            f"named_parameters lacks {len(lost)} of the optimizer's {len(owned)} parameters "
            f"(shapes {', '.join(map(str, lost[:5]))}); pass model.named_parameters() of the same "
            "model"
        )
    return names
