"""``hvd.elastic`` for PyTorch; see :mod:`qsgd_hpc.elastic` for its use in batch jobs.

::

    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            for i, batch in enumerate(loader):
                ...
                state.sampler.record_batch(i, batch_size)
                if i % 100 == 99:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch

from qsgd_hpc.elastic import HostsUpdatedInterrupt, State, run
from qsgd_hpc.frameworks.parts import ElasticShares, Part, StatefulPart
from qsgd_hpc.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "TorchState", "run"]


class ElasticSampler(ElasticShares, torch.utils.data.Sampler[int]):
    """A sampler that distributes a data set among the ranks, after a failure the remaining samples.

    Pass it to a ``DataLoader`` as ``sampler=`` and to a ``TorchState``. Record processed samples
    with ``record_batch`` or ``record_indices``, and call ``set_epoch`` when an epoch has
    ended.

    Args:
        dataset: an object with a length, equal on every rank.
        shuffle: whether to shuffle, in a new order in each epoch that is equal on every rank.
        seed: seed of the shuffling, equal on every rank.
    """


class _TrainedPart(StatefulPart):
    """A model or an optimizer."""

    def begin_again(self) -> None:
        """Drop the gradients of the step that failed: a script may clear them after steps only."""
        model = isinstance(self.value, torch.nn.Module)
        # Not DistributedOptimizer's own, which refuses while gradients are being averaged.
        zero_grad = torch.nn.Module.zero_grad if model else torch.optim.Optimizer.zero_grad
        zero_grad(self.value)


class _ScalerPart(StatefulPart):
    """A loss scaler."""

    def begin_again(self) -> None:
        """Forget which optimizers' gradients were unscaled in the step that failed."""
        if self.value.is_enabled():  # else torch does not create it
            self.value._per_optimizer_states.clear()


class TorchState(State):
    """A model, an optimizer, samplers, and other state of a training.

    Args:
        model: any ``torch.nn.Module``, or None.
        optimizer: any optimizer, distributed or not, or None.
        attributes: samplers, schedulers, loss scalers, further models, epochs, batches...; each
            becomes an attribute.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **attributes: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer}
        super().__init__(**{n: v for n, v in named.items() if v is not None}, **attributes)

    def _part(self, value: Any) -> Part:
        if isinstance(value, torch.nn.Module):
            return _TrainedPart(value, lambda model: broadcast_parameters(model.state_dict()))
        if isinstance(value, torch.optim.Optimizer):
            return _TrainedPart(value, broadcast_optimizer_state)
        if isinstance(value, torch.amp.GradScaler):
            return _ScalerPart(value)
        return super()._part(value)

    def _dump(self, content: Any, stream: BinaryIO) -> None:
        torch.save(content, stream)

    def _load(self, stream: BinaryIO) -> Any:
        # Attributes may be of any type; the file is the user's own.
        return torch.load(stream, map_location="cpu", weights_only=False)
