"""Compression for Lightning: a callback for its Trainer, and one call for Fabric.

::

    trainer = Trainer(strategy="ddp", callbacks=[QSGDCallback(bits=4)])

    model, optimizer = fabric.setup(model, optimizer)
    hook = compress(fabric, model, bits=4)
    fabric.save("checkpoint.pt", {"model": model, "optimizer": optimizer, "hook": hook})

Both work under DDP and under FSDP2 (``ModelParallelStrategy``), with accumulated gradients and
16-bit mixed precision. See docs/ecosystem.md.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from qsgd_hpc.torch.attached import Attached

__all__ = ["QSGDCallback", "compress"]


class QSGDCallback(Callback):
    """Compresses what ``fit`` sends; its part of a checkpoint is what error feedback holds back.

    Args:
        bits: of gradients, per element, sign included.
        weight_bits: bits per weight with FSDP2; None: uncompressed.
        **settings: those of :class:`QSGDState` with DDP, of :func:`quantize_fsdp` with FSDP2.
    """

    def __init__(self, bits: int = 4, weight_bits: int | None = 8, **settings: Any) -> None:
        self._attached = Attached(bits, weight_bits, **settings)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compress from here on: the strategy has wrapped the model, and nothing has run yet."""
        self._attached.attach(trainer.model, getattr(trainer.precision_plugin, "scaler", None))

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's part of a checkpoint; Lightning asks every rank for it."""
        return self._attached.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        self._attached.load_state_dict(state_dict)


def compress(
    fabric: Any, model: Any, bits: int = 4, weight_bits: int | None = 8, **settings: Any
) -> Attached:
    """Compress what a model sends that ``fabric.setup`` has returned.

    Args:
        fabric: it has the precision, and with it perhaps a ``GradScaler``.
        model: what ``fabric.setup`` or ``setup_module`` has returned.
        bits, weight_bits, **settings: as of :class:`QSGDCallback`.
    Returns:
        what belongs into the state that ``fabric.save`` and ``fabric.load`` are given.
    Raises:
        UsageError: neither DDP nor FSDP2 wraps the model, or a setting is invalid.
    """
    attached = Attached(bits, weight_bits, **settings)
    attached.attach(model, getattr(fabric.strategy.precision, "scaler", None))
    return attached
