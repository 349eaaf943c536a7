"""``horovod.common.util``: the helpers that scripts import from there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
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
