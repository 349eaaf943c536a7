"""Find the GPU kernels and the NCCL library of this installation.

The kernels are compiled during installation if a GPU compiler is present (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import functools
from importlib.util import find_spec
from pathlib import Path

from qsgd_hpc import _core, env
from qsgd_hpc._notices import warn
from qsgd_hpc.errors import UsageError

__all__ = [
    "device_type", "library", "load_fault", "nccl", "nccl_version", "platform", "served", "serves",
]  # fmt: skip

TWIN = "twin"


def library() -> str | None:
    """Return the file of the kernels; None if there are none that load, or QSGD_GPU_LIBRARY=none.

    The package's own kernels may not load everywhere: HIP's need ROCm's libraries, which nodes
    without a GPU do not have.

    Raises:
        UsageError: QSGD_GPU_LIBRARY names a file that is not a kernel library of this version.
    """
    chosen: str = env.get("QSGD_GPU_LIBRARY")
    if chosen == "none":
        return None
    if chosen:
        platform(chosen)
        return chosen
    return None if load_fault() else _installed()


@functools.cache
def _installed() -> str | None:
    """Return the file of the package's own kernels."""
    found = sorted(Path(_core.__file__).parent.glob("_gpu.*so"))
    return str(found[0]) if found else None


def load_fault() -> str:
    """Return why the package's own kernels do not load; "" if they do, or are not to be used."""
    own = None if env.get("QSGD_GPU_LIBRARY") else _installed()
    return _load_fault(own) if own else ""


@functools.cache
def _load_fault(library: str) -> str:
    try:
        platform(library)
    except UsageError as error:
        return str(error)
    return ""


def nccl() -> str:
    """Return the file or name of the NCCL library, or RCCL for AMD GPUs; "" if none is to be used.

    PyTorch's wheels install NCCL in the package ``nvidia``; otherwise, the loader searches for it.
    Either every rank returns a library or none does, wherever its libraries are: the engine tests
    together with the other ranks whether it loads.
    """
    chosen: str = env.get("QSGD_NCCL")
    if chosen != "auto":
        return "" if chosen == "none" else chosen
    kernels = library()
    if kernels is not None and platform(kernels) == TWIN:
        return ""  # NCCL cannot use the twin's streams
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
    """Return the version of NCCL or RCCL that can carry GPU tensors: 22703 for 2.27.3.

    0: there is none, or there are no kernels, without which the engine accepts no GPU tensor.
    """
    path = nccl()
    return _core.nccl_version(path) if library() and path else 0


@functools.cache
def platform(library: str) -> str:
    """Return the compiler and the targets of kernels, such as "CUDA 13.0: sm_80, sm_90 and PTX".

    Raises:
        UsageError: the file is not a kernel library of this version; the message has the remedy.
    """
    return _core.gpu_platform(library)


def device_type(library: str) -> str:
    """Return torch's name of the devices whose memory the kernels can read.

    torch calls AMD GPUs "cuda", too. "cpu" is returned for the kernels' twin on the CPU, which
    tests use.
    """
    return "cpu" if platform(library) == TWIN else "cuda"


@functools.cache
def served() -> str | None:
    """Return torch's name of the devices whose tensors the engine accepts; None: host tensors only.

    Cached, because it is called for every tensor. If the package's own kernels do not load, it is
    ``serves`` that says so, for the first tensor on a device.
    """
    if env.get("QSGD_GPU_LIBRARY"):
        chosen = library()
        return device_type(chosen) if chosen else None
    return "cuda" if _installed() else None


@functools.cache
def serves(device: int) -> bool:
    """Return whether the kernels work on a device, given by its number in this process.

    Cached. If they do not load or do not work, this prints the loader's or the driver's message,
    and the device's tensors are coded on the host.
    """
    found = library()
    if found:
        why = _core.gpu_fault(found, device)
        toolkit = "ROCm" if platform(found).startswith("HIP") else "CUDA"
        fault = why and (
            f"the kernels ({platform(found)}) do not work there: {why}. Install qsgd-hpc again "
            f"with the {toolkit} of this machine: load its module first"
        )
    else:
        fault = load_fault()
    if fault:
        warn(
            f"GPU {device}: {fault}. Tensors on it are copied to the host and "
            "coded there. QSGD_GPU_LIBRARY=none silences this warning"
        )
    return bool(found) and not fault
