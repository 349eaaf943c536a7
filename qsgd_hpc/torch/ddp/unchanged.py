"""Compress the gradients of scripts that say nothing of it: DDP at its first forward pass.

Where a hook is registered by then, the script has its own idea, and keeps it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from qsgd_hpc import env
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS

__all__ = ["compress_unasked"]


def compress_unasked(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Have a model compress as QSGD_BITS says, from its first forward pass on.

    Left as they are: a model that has a hook by then, one on one rank, a compiled one, whose hook
    torch would trace, a static graph; and bits "auto" and 32.
    """
    if _first_pass not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_first_pass)


def _first_pass(model: Any, _args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _first_pass:
            del model._forward_pre_hooks[key]
    bits = env.get("QSGD_BITS")
    if bits in (None, AUTO_BITS, PLAIN_BITS) or dist.get_world_size(model.process_group) == 1:
        return
    reason = _why_not(model)
    if reason is None:
        from qsgd_hpc.torch.ddp.hook import compress

        try:
            compress(model, bits=int(bits))
        except QsgdError as error:
            reason = str(error)
    if dist.get_rank() == 0:
        done = f"DDP sends gradients in {bits} bits, with error feedback; the script has no hook"
        left = f"DDP sends gradients as they are, not in {bits} bits: {reason}"
        sys.stderr.write(f"qsgd-hpc: {done if reason is None else left}\n")
        sys.stderr.flush()


def _why_not(model: Any) -> str | None:
    if getattr(model, "_comm_hooks", ()):
        return "the script has registered a hook of its own"
    if model.static_graph:
        return "static_graph=True"
    if not any(p.requires_grad for p in model.module.parameters()):
        return "no parameter has a gradient"
    return None
