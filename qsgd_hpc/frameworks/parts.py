"""Parts of an elastic state: objects that are committed, restored and synchronised; samplers."""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.objects import broadcast_object

__all__ = ["ElasticShares", "Part", "SamplerPart", "StatefulPart", "ValuePart", "require_variables"]


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

    def difference(self, captured: Any) -> str:
        """Return how a capture of another job differs in shape; "" if ``put_back`` checks it."""
        return ""

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


class ElasticShares:
    """A sampler that divides the unprocessed indices of a data set among the ranks.

    Every rank gets equally many: the list is padded with indices from its beginning.

    Args:
        dataset: an object with a length, equal on every rank.
        shuffle: whether to shuffle, in a new order in each epoch that is equal on every rank.
        seed: seed of the shuffling, equal on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        """Recorded on this rank; on every rank after ``TorchState.sync``."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with no samples processed. Call it after the previous epoch has ended."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed a batch; see ``get_indices``."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed these samples."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch, counted from 0 since the last ``reset``."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its processed samples."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``, on any number of ranks."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide the unprocessed samples among the current ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        remaining = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        if self.shuffle:
            random.Random(f"{self.seed}.{self.epoch}").shuffle(remaining)
        self.remaining_indices = remaining
        self.num_samples = -(-len(remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        filled = [remaining[i % len(remaining)] for i in range(self.total_size)]
        self.indices = filled[self.rank :: self.num_replicas]
        """This rank's samples, in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
