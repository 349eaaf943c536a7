"""Compression for Hugging Face Accelerate: one call after ``prepare``.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compress(accelerator, model, bits=4)

It works with DDP and FSDP2, gradient accumulation and mixed precision. ``save_state`` adds a file
with the residuals of error feedback, which ``load_state`` loads. See docs/ecosystem.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qsgd_hpc.torch.attached import Attached

__all__ = ["compress"]


def compress(
    accelerator: Any, model: Any, bits: int = 4, weight_bits: int | None = 8, **settings: Any
) -> Attached:
    """Compress the communication of a model that ``accelerator.prepare`` has returned.

    Args:
        accelerator: its ``save_state`` and ``load_state`` then include the compression's state.
            Checkpoints without it can be loaded, too.
        model: the model that ``prepare`` has returned.
        bits: bits per gradient element, including the sign: 1 to 8 with DDP, 2 to 8 with FSDP2.
        weight_bits: bits per weight with FSDP2; None: uncompressed.
        **settings: those of :class:`QSGDState` with DDP, of :func:`quantize_fsdp` with FSDP2.
    Raises:
        UsageError: neither DDP nor FSDP2 wraps the model, as on a CPU without
            ``Accelerator(cpu=True)``; or a setting is invalid.
    """
    attached = Attached(bits, weight_bits, **settings)
    attached.attach(model, accelerator.scaler)
    parts = set(model.modules())
    number = next((i for i, each in enumerate(accelerator._models) if each in parts), 0)
    if number:
        attached.file = f"qsgd_hpc_{number}.pt"  # Accelerate numbers its files of models so, too

    def save(_models: Any, _weights: Any, folder: str) -> None:
        attached.save(Path(folder), writes=accelerator.is_main_process)

    # register_for_checkpointing() would make checkpoints with and without this state incompatible.
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda _models, folder: attached.load(Path(folder)))
    return attached
