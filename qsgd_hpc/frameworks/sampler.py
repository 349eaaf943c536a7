"""A sampler for jobs that may stop in the middle of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from qsgd_hpc.runtime import basics

__all__ = ["ElasticShares"]


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
