"""The GPU kernels of this installation: whether there are any, and which.

They are compiled when the package is installed where a compiler for GPUs is (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from importlib.util import find_spec
from pathlib import Path

from qsgd_hpc import _core, env

__all__ = ["device_type", "library", "nccl", "nccl_version", "platform", "served", "serves"]

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


def nccl() -> str:
    """Return the file or name of NCCL's library, or of RCCL's for AMD's GPUs; "": none is wanted.

    PyTorch's wheels bring the one in the package ``nvidia``; else the loader looks for it. Every
    rank returns one or none does, wherever its libraries are: whether it loads, the engine finds
    out with the other ranks.
    """
    chosen: str = env.get("QSGD_NCCL")
    if chosen != "auto":
        return "" if chosen == "none" else chosen
    kernels = library()
    if kernels is not None and platform(kernels) == TWIN:
        return ""  # its streams are nothing to NCCL
    if kernels is not None and platform(kernels).startswith("HIP"):
        return "librccl.so.1"
    with contextlib.suppress(ModuleNotFoundError):
        spec = find_spec("nvidia.nccl")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (found := Path(folder, "lib", "libnccl.so.2")).exists():
                return str(found)
    return "libnccl.so.2"


@functools.cache
def nccl_version() -> int:
    """Return the version of NCCL or RCCL that can carry GPU tensors, as 22703 for 2.27.3.

    0: there is none, or there are no kernels, without which the engine takes no GPU tensor.
    """
    path = nccl()
    return _core.nccl_version(path) if library() and path else 0


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


@functools.cache
def serves(device: int) -> bool:
    """Return whether the kernels work on a device, by its number in this process.

    Tried once. If they do not, what the driver says is printed, and tensors there are coded on the
    host.
    """
    found = library()
    if found is None:
        return False
    if why := _core.gpu_fault(found, device):
        print(
            f"qsgd-hpc: warning: GPU {device}: the kernels ({platform(found)}) do not work there: "
            f"{why}. Tensors on it are copied to the host and coded there. Install "
            "qsgd-hpc again with the CUDA of this machine (module load, then QSGD_GPU=cuda), or "
            "silence this with QSGD_GPU_LIBRARY=none",
            file=sys.stderr,
            flush=True,
        )
    return not why
