"""``horovod.common``, ``.basics`` and ``.util``: rank facts as methods, and helpers of scripts.

``HorovodFinder`` resolves the three names to this module.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built
from qsgd_hpc.runtime import basics as runtime

__all__ = [
    "HorovodBasics",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


class HorovodBasics:
    """The functions that every framework module has, as methods.

    Args:
        arguments: the paths of Horovod's compiled libraries; ignored.
    """

    init = staticmethod(runtime.init)
    shutdown = staticmethod(runtime.shutdown)
    is_initialized = staticmethod(runtime.is_initialized)
    rank = staticmethod(runtime.rank)
    size = staticmethod(runtime.size)
    local_rank = staticmethod(runtime.local_rank)
    local_size = staticmethod(runtime.local_size)
    cross_rank = staticmethod(runtime.cross_rank)
    cross_size = staticmethod(runtime.cross_size)
    is_homogeneous = staticmethod(runtime.is_homogeneous)
    start_timeline = staticmethod(runtime.start_timeline)
    stop_timeline = staticmethod(runtime.stop_timeline)
    mpi_threads_supported = staticmethod(common.mpi_threads_supported)
    mpi_enabled = staticmethod(common.mpi_enabled)
    mpi_built = staticmethod(common.mpi_built)
    gloo_enabled = staticmethod(common.gloo_enabled)
    gloo_built = staticmethod(common.gloo_built)
    nccl_built = staticmethod(common.nccl_built)
    ddl_built = staticmethod(common.ddl_built)
    ccl_built = staticmethod(common.ccl_built)
    cuda_built = staticmethod(common.cuda_built)
    rocm_built = staticmethod(common.rocm_built)

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def gpu_available(ext_base_name: str = "", verbose: bool = False) -> bool:
    """Return whether there are kernels that code tensors on the GPU."""
    return common.cuda_built() or common.rocm_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework (``"torch"``, ``"tensorflow"``, ``"mxnet"``) is installed."""
    return find_spec(ext_base_name) is not None


def check_extension(*arguments: Any) -> None:
    """Do nothing: the one core for all frameworks is loaded already."""


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Cut a sequence into ``count`` parts of almost equal length, the first ones longer."""
    each, more = divmod(len(items), count)
    ends = [each * part + min(part, more) for part in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated over."""
    return isinstance(value, Iterable)


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables while in the block, except those given as None."""
    values = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
