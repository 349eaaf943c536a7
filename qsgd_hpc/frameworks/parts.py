"""Parts of an elastic state: objects that are committed, restored and synchronised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from qsgd_hpc.frameworks.sampler import ElasticShares
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.objects import broadcast_object

__all__ = ["Part", "SamplerPart", "StatefulPart", "ValuePart"]


class Part(ABC):
    """One attribute of a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def capture(self) -> Any:
        """Return a picklable copy that later changes do not reach."""

    @abstractmethod
    def put_back(self, captured: Any) -> None:
        """Return to what was captured, as often as one likes."""

    def sync(self) -> None:
        """Give every rank what rank 0 has; collective."""
        self.put_back(broadcast_object(self.capture() if basics.rank() == 0 else None, 0, None))

    def merge(self, captured: Any) -> Any:
        """Return what rank 0 has to write of a capture for all ranks; collective."""
        return captured


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
        broadcast: gives every rank the object's state of rank 0, if there is a better way than
            pickling it.
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
        """Give every rank the state of rank 0."""
        if self._broadcast is None:
            super().sync()
        else:
            self._broadcast(self.value)


class SamplerPart(StatefulPart):
    """A sampler, of which every rank has processed other samples."""

    value: ElasticShares

    def sync(self) -> None:
        """Give every rank what any rank has processed of rank 0's epoch."""
        epoch = broadcast_object(self.value.epoch, 0, None)
        mine = self.capture() if self.value.epoch == epoch else {"processed_indices": ()}
        self.put_back(self.merge({**mine, "epoch": epoch}))

    def merge(self, captured: Any) -> Any:
        """Return the capture with what all ranks have processed."""
        import numpy as np

        mask = np.zeros(len(self.value.dataset), np.uint8)
        mask[list(captured["processed_indices"])] = 1
        buffer = ops.Buffer(mask.ctypes.data, mask.shape, "uint8", mask)
        ops.allreduce(buffer, buffer, name=None, op=ops.Max, result=lambda: None).wait()
        return {**captured, "processed_indices": set(np.flatnonzero(mask).tolist())}
