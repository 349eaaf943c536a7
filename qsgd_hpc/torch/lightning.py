"""Compression for Lightning: a callback for its Trainer, and one call for Fabric.

::

    trainer = Trainer(strategy="ddp", callbacks=[QSGDCallback(bits=4)])

    model, optimizer = fabric.setup(model, optimizer)
    hook = compress(fabric, model, bits=4)
    fabric.save("checkpoint.pt", {"model": model, "optimizer": optimizer, "hook": hook})

Both work with DDP and FSDP2 (``ModelParallelStrategy``), gradient accumulation and 16-bit mixed
precision. See docs/ecosystem.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from qsgd_hpc.torch._distributed import say
from qsgd_hpc.torch.attached import Attached

__all__ = ["QSGDCallback", "compress"]


class QSGDCallback(Callback):  # type: ignore[misc]
    """A callback that compresses ``fit``; checkpoints contain the residuals of error feedback.

    Args:
        bits: bits per gradient element, including the sign: 1 to 8 with DDP, 2 to 8 with FSDP2.
        weight_bits: bits per weight with FSDP2; None: uncompressed.
        **settings: those of :class:`QSGDState` with DDP, of :func:`quantize_fsdp` with FSDP2.
    """

    def __init__(self, bits: int = 4, weight_bits: int | None = 8, **settings: Any) -> None:
        self._attached = Attached(bits, weight_bits, **settings)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to compress: the strategy has wrapped the model, and no step has run yet."""
        self._attached.attach(trainer.model, getattr(trainer.precision_plugin, "scaler", None))

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]
    ) -> None:
        """Report a checkpoint of a training without this callback."""
        if self.state_key not in checkpoint.get("callbacks", {}) and trainer.world_size > 1:
            say("the checkpoint has no state of QSGDCallback: error feedback starts from zero")

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's part of a checkpoint; Lightning calls this on every rank."""
        return self._attached.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of any number of ranks."""
        self._attached.load_state_dict(state_dict)


def compress(
    fabric: Any, model: Any, bits: int = 4, weight_bits: int | None = 8, **settings: Any
) -> Attached:
    """Compress the communication of a model that ``fabric.setup`` has returned.

    Args:
        fabric: the Fabric; its precision may have a ``GradScaler``.
        model: the model that ``fabric.setup`` or ``setup_module`` has returned.
        bits, weight_bits, **settings: as for :class:`QSGDCallback`.
    Returns:
        an object to include in the state that is passed to ``fabric.save`` and ``fabric.load``.
    Raises:
        UsageError: neither DDP nor FSDP2 wraps the model, or a setting is invalid.
    """
    attached = Attached(bits, weight_bits, **settings)
    attached.attach(model, getattr(fabric.strategy.precision, "scaler", None))
    return attached
