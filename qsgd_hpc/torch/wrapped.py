"""Base class of distributed optimizers, which are instances of the wrapped optimizer's class."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["Wrapped", "wrap"]


class Wrapped(torch.optim.Optimizer):
    """An optimizer that wraps another one.

    It is pickled and saved as the wrapped optimizer, because the job that loads it may have another
    number of ranks.
    """

    _unwrapped: Any
    _copies = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle accepts an object of another class only as the result of a call.
        return copy.copy, (self._plain(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a distributed optimizer of copied parameters."""
        distributed = wrap(copy.deepcopy(self._plain(), memo), type(self).__bases__[0])
        # The suffix takes no number from the shared count, because only rank 0 may make copies.
        self._copies += 1
        distributed.begin_copy(self, f"copy{self._copies}.", memo)
        return distributed

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state; see ``torch.optim.Optimizer.load_state_dict``."""
        super().load_state_dict(state_dict)
        # torch creates new groups and state. A scheduler that was built on the unwrapped optimizer
        # would change the rates of the old groups.
        kept = {"state": self.state, "param_groups": self.param_groups}
        vars(self._unwrapped).update(kept)

    def begin_copy(self, original: Any, suffix: str, memo: dict[int, Any]) -> None:
        """Initialise the wrapper of a copy with the original's arguments.

        Args:
            original: an optimizer of the same class.
            suffix: suffix of the operations' names.
            memo: the copy of each parameter, by the parameter's ``id``.
        """
        raise NotImplementedError

    def _plain(self) -> Any:
        """Return an instance of the wrapped class with the current state."""
        plain = object.__new__(type(self._unwrapped))
        kept = {k: vars(self).get(k, v) for k, v in vars(self._unwrapped).items()}
        plain.__dict__.update(kept)
        return plain


def wrap(optimizer: torch.optim.Optimizer, ours: type[Wrapped]) -> Any:
    """Return an instance of the optimizer's class and ours that has the optimizer's state."""
    kind = type(optimizer)
    wrapped: Any = type(kind.__name__, (ours, kind), {})
    distributed = wrapped.__new__(wrapped)
    # A scheduler that was built earlier has stored its counting wrapper of ``step`` in the
    # instance, which would hide the step of the new class.
    distributed.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    distributed._unwrapped = optimizer
    return distributed
