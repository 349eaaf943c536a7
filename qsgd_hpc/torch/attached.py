"""Compression of a model that another library has wrapped in DDP or FSDP2.

Lightning, the Hugging Face Trainer and Accelerate wrap models and write checkpoints
themselves. This module has the common part; ``lightning.py``, ``transformers.py`` and
``accelerate.py`` call it at the right times.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch._distributed import say
from qsgd_hpc.torch.ddp import QSGDState, compress

if TYPE_CHECKING:
    from qsgd_hpc.torch.fsdp import QuantizedShards

__all__ = ["Attached"]

FILE = "qsgd_hpc.pt"
# Attributes by which libraries and torch.compile hold the model that they have wrapped.
_INNER = ("_forward_module", "_orig_mod")


class Attached:
    """The compression of one model in any wrapper, and its part of a checkpoint.

    Args:
        bits: bits per gradient element, including the sign: 1 to 8 with DDP, 2 to 8 with FSDP2.
        weight_bits: bits per weight with FSDP2; None: uncompressed.
        **settings: those of :class:`QSGDState` with DDP, of :func:`quantize_fsdp` with FSDP2.
    """

    def __init__(self, bits: int = 4, weight_bits: int | None = 8, **settings: Any) -> None:
        self._bits, self._weight_bits, self._settings = bits, weight_bits, settings
        self._state: QSGDState | QuantizedShards | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._last: weakref.ref[nn.Module] | None = None
        self.file = FILE
        """Name of the file in a checkpoint's folder."""

    def attach(self, model: nn.Module, scaler: Any = None) -> None:
        """Compress the model's gradients from its next backward pass on, with more than one rank.

        Args:
            model: the model as wrapped by the library, the same on every rank.
            scaler: the ``GradScaler`` of a float16 training, if any.
        Raises:
            UsageError: neither DDP nor FSDP2 wraps the model, or a setting is invalid.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        ranks = max(ranks, int(os.environ.get("WORLD_SIZE", "1")))
        if ranks == 1:
            return
        inner: Any = model
        while name := next((name for name in _INNER if hasattr(inner, name)), None):
            inner = getattr(inner, name)
        if any(state is self._state for _, state in getattr(inner, "_comm_hooks", ())):
            # The Trainer trains again with the same DDP model, which has the hook.
            self._loaded = None
            if isinstance(self._state, QSGDState):
                self._state.scaler = scaler
            return
        bare = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if self._state is not None and self._loaded is None and self._is_last(bare):
            self._loaded = self.state_dict()  # a second fit continues from the end of the first
        self._last = weakref.ref(bare)
        if isinstance(inner, DistributedDataParallel):
            self._state = compress(inner, self._bits, scaler=scaler, **self._settings)
        elif _is_sharded(inner):
            from qsgd_hpc.torch.fsdp import quantize_fsdp  # needs a newer PyTorch than DDP

            self._state = quantize_fsdp(inner, self._bits, self._weight_bits, **self._settings)
        else:
            raise UsageError(
                f"{ranks} ranks were started, but neither DDP nor FSDP2 wraps this "
                f"{type(inner).__name__}: each rank would train separately. Choose one of them "
                "as the strategy (on CPUs Accelerate needs cpu=True, the Trainer "
                "use_cpu=True), and compress after the model is wrapped, before the first step"
            )
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._load(loaded)

    def _is_last(self, model: nn.Module) -> bool:
        return self._last is not None and self._last() is model

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of error feedback; collective, at the same step.

        It is the same on every rank, and a training on any number of ranks can resume from it; {}
        if nothing is compressed.
        """
        if self._state is None:
            return dict(self._loaded or {})
        if isinstance(self._state, QSGDState):
            return self._state.global_state_dict()
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, of any number of ranks, before or after :meth:`attach`."""
        self._loaded = state
        if self._state is not None:
            self._load(state)

    def save(self, folder: Path, *, writes: bool) -> None:
        """Add a file with :meth:`state_dict` to the folder of a checkpoint; collective.

        Args:
            folder: the same on every rank.
            writes: whether this rank writes the file.
        """
        state = self.state_dict()
        if state and writes:
            torch.save(state, folder / self.file)

    def load(self, *folders: Path) -> None:
        """Load the file from the first of these folders that has one.

        Checkpoints of trainings without this compression have none, which rank 0 reports.
        """
        found = next(filter(Path.is_file, (folder / self.file for folder in folders)), None)
        if found is not None:
            self.load_state_dict(torch.load(found, weights_only=True))
        elif dist.is_initialized() and dist.get_world_size() > 1:
            where = " or ".join(map(str, folders))
            say(f"no {self.file} in {where}: error feedback starts from zero")

    def _load(self, state: Mapping[str, Any]) -> None:
        if not state or self._state is None:
            return
        if ("parameters" in state) == isinstance(self._state, QSGDState):
            self._state.load_state_dict(state)
        else:
            say(
                "the checkpoint is of a training with the other of DDP and FSDP2: error "
                "feedback starts from zero"
            )


def _is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a part of a model, with any version of PyTorch."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    return any(each.__name__ == "FSDPModule" for each in classes)
