"""The GPU kernels of this installation: whether there are any, and which.

They are compiled when the package is installed where a compiler for GPUs is (docs/gpu.md).
"""

from __future__ import annotations

import functools
from pathlib import Path

from qsgd_hpc import _core, env

__all__ = ["device_type", "library", "platform", "served"]

TWIN = "twin"


def library() -> str | None:
    """Return the file of the kernels; None if there are none, or none are wanted.

    Raises:
        UsageError: QSGD_GPU_LIBRARY names something else.
    """
    chosen: str = env.get("QSGD_GPU_LIBRARY")
    if chosen == "none":
        return None
    if chosen:
        platform(chosen)
        return chosen
    found = sorted(Path(_core.__file__).parent.glob("_gpu.*so"))
    return str(found[0]) if found else None


@functools.cache
def platform(library: str) -> str:
    """Return what kernels were compiled with and for, as in "CUDA 13.0: sm_80, sm_90 and PTX".

    Raises:
        UsageError: the file is none of this version's; the message says what to do.
    """
    return _core.gpu_platform(library)


def device_type(library: str) -> str:
    """Return torch's name of the devices whose memory the kernels can read.

    Those of AMD go by "cuda", too. "cpu" is for the kernels' twin, with which they are tested.
    """
    return "cpu" if platform(library) == TWIN else "cuda"


@functools.cache
def served() -> str | None:
    """Return torch's name of the devices whose tensors the engine takes; None: the host's alone.

    Decided once per process, as it is asked for every tensor. The package's own kernels are not
    loaded for it: most jobs have no tensor on a device.
    """
    found = library()
    if found is None:
        return None
    return device_type(found) if env.get("QSGD_GPU_LIBRARY") else "cuda"
