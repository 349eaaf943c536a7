"""The contract suite: every rank runs the same tests in the same order.

Runs as plain ``pytest`` on one rank, and on more under
``qsgd-hpc run -np N python -m pytest -p tests.ranks``.
"""

from __future__ import annotations

import functools
import os

import pytest

from qsgd_hpc.runtime import basics
from tests.contract.adapters import ADAPTERS
from tests.gpu.memory import has_device


@pytest.fixture(scope="package", autouse=True)
def end_job():
    """Leave no job running for the tests of other folders that share this process."""
    yield
    basics.shutdown()


@functools.cache
def adapter(name):
    pytest.importorskip(name.partition(".")[0])
    return ADAPTERS[name]()


@pytest.fixture(scope="module", params=ADAPTERS)
def framework(request):
    """A framework's adapter, with the job running and process sets allowed later."""
    yield from job(request.param)


@pytest.fixture(scope="module", params=[n for n, kind in ADAPTERS.items() if kind.has_handles])
def with_handles(request):
    """The same, of frameworks with asynchronous calls."""
    yield from job(request.param)


def job(name):
    chosen = adapter(name)
    chosen.hvd.shutdown()
    chosen.hvd.init(process_sets="dynamic")
    yield chosen
    chosen.hvd.shutdown()
    chosen.hvd.init()


@pytest.fixture(scope="module")
def torch_job(request):
    """PyTorch's job, for a module of its own tests; all ranks leave the module together."""
    torch = pytest.importorskip("qsgd_hpc.torch")
    torch.init()
    cuda = pytest.importorskip("torch").cuda
    if has_device() and cuda.device_count() < torch.local_size():
        # NCCL takes no GPU twice on one host. On a host each, ranks meet over sockets.
        host = f"host-{torch.rank()}"
        os.environ.update(NCCL_HOSTID=host, NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    yield
    if not request.session.testsfailed:  # else the others may never come
        torch.barrier()


@pytest.fixture(scope="module")
def hvd(framework):
    """The framework's module."""
    return framework.hvd
