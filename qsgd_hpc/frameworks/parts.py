"""Parts of an elastic state: objects that are committed, restored and synchronised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.sampler import ElasticShares
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.objects import broadcast_object

__all__ = ["Part", "SamplerPart", "StatefulPart", "ValuePart", "require_variables"]


class Part(ABC):
    """One attribute of a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def capture(self) -> Any:
        """Return a picklable copy that later changes do not affect."""

    @abstractmethod
    def put_back(self, captured: Any) -> None:
        """Restore a captured state; can be called repeatedly with the same one."""

    def sync(self) -> None:
        """Replace the value on every rank by rank 0's; collective."""
        self.put_back(broadcast_object(self.capture() if basics.rank() == 0 else None, 0, None))

    def begin_again(self) -> None:  # noqa: B027
        """Discard what a step that failed has left, which is not part of the state."""

    def merge(self, captured: Any) -> Any:
        """Return the part of all ranks' captures that rank 0 must write; collective."""
        return captured


def require_variables(captured: Sequence[Any], variables: Sequence[Any]) -> None:
    """Check that there is a variable for every captured value.

    Raises:
        UsageError: there are fewer, for example because a model is not built yet.
    """
    if len(captured) > len(variables):
        raise UsageError(
            f"{len(captured)} variables were committed, but there are {len(variables)} now: "
            "build the model (and its optimizer: "
            "optimizer.build(model.trainable_variables)) before elastic.run resumes it"
        )


class ValuePart(Part):
    """A plain value: a number, a string, a list..."""

    def capture(self) -> Any:
        """Return a copy of the value."""
        return copy.deepcopy(self.value)

    def put_back(self, captured: Any) -> None:
        """Replace the value."""
        self.value = copy.deepcopy(captured)


class StatefulPart(Part):
    """Anything with ``state_dict`` and ``load_state_dict``.

    Args:
        value: the object.
        broadcast: replaces the object's state on every rank by rank 0's; default: pickles it.
    """

    def __init__(self, value: Any, broadcast: Callable[[Any], None] | None = None) -> None:
        super().__init__(value)
        self._broadcast = broadcast

    def capture(self) -> Any:
        """Return a copy of the state."""
        return copy.deepcopy(self.value.state_dict())

    def put_back(self, captured: Any) -> None:
        """Load the state."""
        self.value.load_state_dict(copy.deepcopy(captured))

    def sync(self) -> None:
        """Replace the state on every rank by rank 0's; collective."""
        if self._broadcast is None:
            super().sync()
        else:
            self._broadcast(self.value)


class SamplerPart(StatefulPart):
    """A sampler, of which every rank has processed different samples."""

    value: ElasticShares

    def sync(self) -> None:
        """Combine the samples that all ranks have processed in rank 0's epoch; collective."""
        epoch = broadcast_object(self.value.epoch, 0, None)
        mine = self.capture() if self.value.epoch == epoch else {"processed_indices": ()}
        self.put_back(self.merge({**mine, "epoch": epoch}))

    def merge(self, captured: Any) -> Any:
        """Return the capture with the samples that any rank has processed; collective."""
        import numpy as np

        mask = np.zeros(len(self.value.dataset), np.uint8)
        mask[list(captured["processed_indices"])] = 1
        ops.reduce_array(mask, None, ops.Max)
        return {**captured, "processed_indices": set(np.flatnonzero(mask).tolist())}
