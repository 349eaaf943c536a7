"""Compressed gradients for DistributedDataParallel, with two additional lines in a DDP script.

::

    state = QSGDState(bits=4)
    model.register_comm_hook(state, qsgd_hook)

Needs torch.distributed and the compiled core, but neither MPI nor ``hvd.init()``. See docs/ddp.md.
"""

from qsgd_hpc.torch.ddp.hook import compress, qsgd_hook
from qsgd_hpc.torch.ddp.state import QSGDState

__all__ = ["QSGDState", "compress", "qsgd_hook"]
