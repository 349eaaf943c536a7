"""Collectives over torch tensors, blocking and asynchronous, most of them differentiable."""

from __future__ import annotations

from torch._compile import _disable_dynamo

from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import barrier, poll, synchronize
from qsgd_hpc.torch.ops import _moves, _reductions
from qsgd_hpc.torch.ops._moves import *
from qsgd_hpc.torch.ops._reductions import *

__all__ = ["barrier", "join", "poll", "synchronize"]
__all__ += _moves.__all__
__all__ += _reductions.__all__


def join(device: int = -1) -> int:
    """Announce that this rank has no more batches; return the last rank when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.

    Args:
        device: accepted for compatibility; zeros need no device.
    """
    return ops.join()


# torch.compile splits a program at these calls. It would trace them, once for each name.
globals().update({name: _disable_dynamo(globals()[name]) for name in __all__})
