"""Compression of DDP and FSDP2 in unchanged scripts, enabled at a model's first forward pass.

Compression that the script has set up by then is kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from qsgd_hpc import env
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS
from qsgd_hpc.torch._distributed import hook_states, say
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["compress_unasked", "quantize_unasked"]

reported = False
"""Whether it was reported how a model sends its gradients."""
_HOOK = "the script has registered a hook of its own"
_DECIDED = "_qsgd_decided"
"""Attribute of a model that has trained; its copies have it, too."""


def compress_unasked(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Compress a model's gradients as QSGD_BITS specifies; called before each of its passes.

    Does something in the first pass that trains only. Not compressed: a model that has a hook by
    then, a model on one rank, a compiled model, whose hook torch would trace, and a static graph;
    bits "auto" and 32.
    """
    if not torch.is_grad_enabled():
        return
    if getattr(model, _DECIDED, False):
        return
    if not any(p.requires_grad for p in model.module.parameters()):
        return  # frozen for now, as a GAN's discriminator is while its generator trains
    setattr(model, _DECIDED, True)
    bits = env.get("QSGD_BITS")
    if bits in (None, AUTO_BITS, PLAIN_BITS) or dist.get_world_size(model.process_group) == 1:
        return
    reason = _why_not(model)
    if reason is None:
        from qsgd_hpc.torch.ddp import compress

        try:
            state = compress(model, bits=int(bits), scaler=_scaler())
        except QsgdError as error:
            reason = str(error)
        else:
            reason = _why_nothing(model, state.compression)
    global reported
    reported = True
    group = model.process_group  # rank 0 may not be in it
    if reason is None:
        text = f"DDP sends gradients in {bits} bits, with error feedback; the script has no hook"
        say(text, group)
        if getattr(torch.optim.Optimizer, "qsgd_loaded", False):
            _say_once(
                "the script has loaded an optimizer, but its checkpoint has no residuals: error "
                "feedback starts from zero",
                group,
            )
    elif reason != _HOOK:
        say(f"DDP sends gradients uncompressed, not in {bits} bits: {reason}", group)
    elif type(own := hook_states(model)[-1]).__name__ != "QSGDState":
        say(f"--bits {bits} has no effect: {reason}", group)
    elif own.bits != bits:
        say(f"the script compresses in {own.bits} bits itself: --bits {bits} has no effect", group)


def quantize_unasked(module: Any) -> None:
    """Make a module under FSDP2 send codes, as QSGD_WEIGHT_BITS and QSGD_BITS specify.

    All sharded modules in the outermost module are changed when that is first called.
    """
    from qsgd_hpc.torch.fsdp.layout import before_first_gathering

    before_first_gathering(module, _quantize)


def _quantize(module: Any) -> None:
    from qsgd_hpc.torch.fsdp import is_quantized, quantize_fsdp
    from qsgd_hpc.torch.fsdp.layout import sharded_modules

    if any(map(is_quantized, sharded_modules(module).values())):
        return
    weights, given = env.get("QSGD_WEIGHT_BITS"), env.get("QSGD_BITS")
    gradients = given if isinstance(given, int) and given != PLAIN_BITS else None
    sent = [
        f"{what} in {b} bits" for what, b in (("weights", weights), ("gradients", gradients)) if b
    ]
    try:
        quantize_fsdp(module, gradients, weights)
    except QsgdError as error:
        _say_once(
            f"FSDP2 sends {type(module).__name__} as it is, not {' and '.join(sent)}: {error}"
        )
    else:
        _say_once(f"FSDP2 sends {' and '.join(sent)}; the script does not call quantize_fsdp")


@functools.cache
def _say_once(text: str, group: Any = None) -> None:
    """Print a line once, also if several modules are outermost, as blocks without a root are."""
    say(text, group)


def _scaler() -> Any:
    """Return the GradScaler if exactly one is enabled; launch/start_up keeps a list of them."""
    made = getattr(torch.amp.grad_scaler, "qsgd_scalers", ())
    enabled = [scaler for scaler in made if scaler.is_enabled()]
    return enabled[0] if len(enabled) == 1 else None


def _why_nothing(model: Any, compression: Any) -> str | None:
    """Return why none of a model's gradients is coded, if that is so."""
    for name, parameter in model.module.named_parameters():
        kind = name_of(parameter.dtype)
        if parameter.requires_grad and compression.coding_for_gradient(name, parameter.shape, kind):
            return None
    ruled = ", and no rule selects one" if compression.rules else ""
    return f"none has two dimensions and at least {compression.min_elements:,} elements{ruled}"


def _why_not(model: Any) -> str | None:
    if hook_states(model):
        return _HOOK
    if model.static_graph:
        return "static_graph=True"
    if any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()):
        return "its optimizer steps in the backward pass, through DDP's only hook"
    return None
