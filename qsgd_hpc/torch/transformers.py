"""Compression for the Hugging Face Trainer: a callback.

::

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(QSGDCallback(trainer, bits=4))
    trainer.train()

It works with DDP and FSDP2, gradient accumulation and mixed precision. Each checkpoint of the
Trainer gets a file with the residuals of error feedback, which a resumed training loads. See
docs/ecosystem.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from qsgd_hpc.torch.attached import Attached

__all__ = ["QSGDCallback"]


class QSGDCallback(TrainerCallback):
    """A callback that compresses the communication of ``train``.

    Args:
        trainer: the Trainer to which it is added; the Trainer passes the inner model to its
            callbacks, not DDP.
        bits: bits per gradient element, including the sign: 1 to 8 with DDP, 2 to 8 with FSDP2.
        weight_bits: bits per weight with FSDP2; None: uncompressed.
        **settings: those of :class:`QSGDState` with DDP, of :func:`quantize_fsdp` with FSDP2.
    """

    def __init__(
        self, trainer: Any, bits: int = 4, weight_bits: int | None = 8, **settings: Any
    ) -> None:
        self._trainer = trainer
        self._attached = Attached(bits, weight_bits, **settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to compress; a resumed training loads the state of its checkpoint."""
        if state.global_step > 0:
            named = args.resume_from_checkpoint
            chosen = [Path(named)] if isinstance(named, str) else []
            self._attached.load(*chosen, _checkpoint(args, state.global_step))
        self._attached.attach(self._trainer.model_wrapped, self._trainer.accelerator.scaler)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add this callback's file to the checkpoint that the Trainer has written."""
        folder = _checkpoint(args, state.global_step)
        self._attached.save(folder, writes=state.is_world_process_zero and folder.is_dir())


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
