"""Claims of optimizers on parameters, which several optimizers may share."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import torch

__all__ = ["Claim"]

_NUMBERS = itertools.count()
_CLAIMS: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()  # oldest first
_LEFT: list[Claim] = []
"""Claims of deleted optimizers with reductions in flight, for which other ranks wait."""


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
