"""Arrays of CuPy and JAX on a GPU, where there is one: their streams, and where their values go.

tests/gpu/test_arrays_on_device.py compares the values with those of the kernels' twin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qsgd_hpc.arrays as hvd
from tests.gpu.memory import has_cupy, has_device, has_jax

needs_cupy = pytest.mark.skipif(not has_cupy(), reason="there is no GPU with CuPy")
needs_jax = pytest.mark.skipif(not has_jax(), reason="there is no GPU with JAX")

COUNT = 100_003
LATE = 500_000_000  # cycles: some tenths of a second
SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()


@pytest.fixture(scope="module")
def cupy():
    """CuPy, after one call of each kind: later ones find everything loaded."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    for dtype in ("float32", "uint8"):
        x = late(cupy, stream, dtype, cycles=1)
        with stream:
            hvd.allreduce_(x, op=hvd.Sum)
            hvd.allreduce(x)
    return cupy


def spin(cupy: Any, cycles: int) -> None:
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(cycles),))


def total():
    """What the ranks' numbers, counted from 1, add up to."""
    return hvd.size() * (hvd.size() + 1) // 2


def late(cupy: Any, stream: Any, dtype: str = "float32", *, cycles: int = LATE) -> Any:
    """Return an array that the stream fills with this rank's number, counted from 1, later."""
    with stream:
        x = cupy.zeros(COUNT, dtype)
        spin(cupy, cycles)
        x += hvd.rank() + 1
    return x


class Interface:
    """An array that can do nothing but tell where its memory is, and which stream fills it."""

    def __init__(self, array: Any, stream: Any, *, read_only: bool = False) -> None:
        self.array = array
        shown = array.__cuda_array_interface__
        data = (shown["data"][0], read_only)
        self.__cuda_array_interface__ = {**shown, "data": data, "stream": stream.ptr}


@needs_cupy
@pytest.mark.parametrize("in_place", [False, True])
def test_cupys_current_stream_is_awaited_but_not_by_the_host(cupy, in_place):
    stream = cupy.cuda.Stream(non_blocking=True)
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    x = late(cupy, stream)
    with stream:
        handle = start(x, op=hvd.Sum)
        assert not stream.done, "the host has waited"
    result = hvd.synchronize(handle)
    assert (result is x) == in_place
    assert bool((result == total()).all())
    assert bool((x == (total() if in_place else hvd.rank() + 1)).all())


@needs_cupy
@pytest.mark.parametrize("in_place", [False, True])
def test_the_stream_of_cupys_array_interface_is_awaited(cupy, in_place):
    stream = cupy.cuda.Stream(non_blocking=True)
    mine = Interface(late(cupy, stream), stream)
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    handle = start(mine, op=hvd.Sum)
    assert not stream.done, "the host has waited"
    result = hvd.synchronize(handle)
    assert (result is mine) == in_place
    assert bool((getattr(result, "array", result) == total()).all())


@needs_cupy
@pytest.mark.skipif(not has_device(), reason="torch has no GPU")
def test_dlpack_of_torch_makes_cupys_stream_wait(cupy):
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(COUNT, device="cuda")
        torch.cuda._sleep(LATE)
        x += hvd.rank() + 1
        handle = hvd.allreduce_async_(x, op=hvd.Sum)
        assert not side.query(), "the host has waited"
        assert hvd.synchronize(handle) is x
    assert bool((x == total()).all())


@needs_cupy
def test_memory_of_cupys_pool_outlasts_what_another_stream_reads(cupy):
    """The widened elements are narrowed in the stream that waits, not in that of the call."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        handle = hvd.allreduce_async(late(cupy, first, "uint8"))
    with second:
        spin(cupy, LATE)
        result = hvd.synchronize(handle)
    with first:
        others = [cupy.full(COUNT, -1, cupy.int64) for _ in range(8)]
    second.synchronize()
    assert bool((result == total() // hvd.size()).all())
    del others


@needs_cupy
def test_arrays_of_cupy_with_gaps_are_replaced_in_their_place(cupy):
    whole = cupy.zeros((40, 60))
    whole[:, ::2] = hvd.rank() + 1
    hvd.allreduce_(whole[:, ::2], op=hvd.Sum)
    assert bool((whole[:, ::2] == total()).all())
    assert not bool(whole[:, 1::2].any())
    whole[1] = hvd.rank()
    hvd.broadcast_(whole.T[::2], hvd.size() - 1)
    assert bool((whole[1, ::2] == hvd.size() - 1).all())


@needs_cupy
def test_arrays_of_numpy_and_cupy_are_reduced_in_one_call(cupy):
    libraries = [cupy, np, cupy] if hvd.rank() % 2 else [np, cupy, cupy]
    mine = [library.full(100, hvd.rank() + 1.0) for library in libraries]
    for reduced in (hvd.grouped_allreduce(mine, op=hvd.Sum), hvd.grouped_allgather(mine)):
        assert [type(x) for x in reduced] == [library.ndarray for library in libraries]
        assert all(float(x[0]) in (1.0, total()) for x in reduced)


@needs_cupy
def test_what_cupys_neighbours_cannot_give_is_refused(cupy):
    x = cupy.ones(3, cupy.float32)
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(Interface(x, cupy.cuda.Stream.null, read_only=True))
    with pytest.raises(ValueError, match=r"Compression\.fp16"):
        hvd.allreduce(x, compression=hvd.Compression.bf16)
    assert bool((hvd.allreduce(x, compression=hvd.Compression.fp16) == 1).all())


@pytest.fixture(scope="module")
def jax():
    """JAX, after one call of each kind."""
    import jax

    import qsgd_hpc.jax as hvd

    hvd.allreduce(computed(), op=hvd.Sum).block_until_ready()
    return jax


@functools.cache
def long_program() -> Callable[..., Any]:
    """Return a program that takes a GPU some tenths of a second: x, as often as it says."""
    import jax

    def program(x: Any, times: Any) -> Any:
        return times * jax.lax.fori_loop(0, 6000, lambda _, y: (y @ y) / y.shape[0], x)

    return jax.jit(program)


def computed() -> Any:
    """Return an array that has this rank's number, counted from 1, in the end."""
    import jax

    return long_program()(jax.numpy.ones((2048, 2048)), hvd.rank() + 1.0)


@needs_jax
def test_values_of_jax_are_awaited_but_not_by_the_host(jax):
    import qsgd_hpc.jax as hvd

    x = computed()
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    assert not x.is_ready(), "the host has waited"
    result = hvd.synchronize(handle)
    assert result.devices() == x.devices()
    np.testing.assert_allclose(result, total(), rtol=1e-3)
    np.testing.assert_allclose(x, hvd.rank() + 1, rtol=1e-3)


@needs_jax
def test_values_of_jax_within_a_program_are_awaited(jax):
    import qsgd_hpc.jax as hvd

    @jax.jit
    def program(x: Any, mine: Any) -> Any:
        y = hvd.allreduce(long_program()(x, mine), op=hvd.Sum, name="late")
        return y, hvd.allreduce(y * 2, op=hvd.Sum, name="later")

    for _ in range(2):
        first, second = program(jax.numpy.ones((2048, 2048)), hvd.rank() + 1.0)
        np.testing.assert_allclose(first, total(), rtol=1e-3)
        np.testing.assert_allclose(second, 2 * hvd.size() * total(), rtol=1e-3)


@needs_jax
def test_results_of_jax_may_be_donated(jax):
    import qsgd_hpc.jax as hvd

    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    x = jax.device_put(jax.numpy.full(COUNT, hvd.rank() + 1.0), jax.local_devices()[0])
    for _ in range(3):
        summed = hvd.allreduce(x, op=hvd.Sum)
        assert summed.committed
        result = add(summed, x)
        assert summed.is_deleted()
        np.testing.assert_array_equal(result, total() + hvd.rank() + 1)


@needs_jax
def test_an_array_of_jax_is_not_replaced(jax):
    with pytest.raises(ValueError, match="is read-only; use allreduce,"):
        hvd.allreduce_(jax.numpy.ones(3))


@needs_jax
def test_gradients_of_jax_are_reduced_within_a_program(jax):
    import qsgd_hpc.jax as hvd

    compression = hvd.Compression.qsgd(bits=8, min_elements=0)

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: ((p["w"] @ x) ** 2).sum() + p["b"].sum())(params)
        return hvd.allreduce_gradients(gradients, compression=compression)

    params = {"w": jax.numpy.ones((64, 64)), "b": jax.numpy.ones(8)}
    x = jax.numpy.full(64, hvd.rank() + 1.0)
    for _ in range(2):
        gradients = step(params, x)
    exact = 2 * 64 * sum((r + 1) ** 2 for r in range(hvd.size())) / hvd.size()
    np.testing.assert_allclose(gradients["w"], exact, rtol=0.02)
    np.testing.assert_allclose(gradients["b"], 1.0, rtol=0.02)
    for leaf in gradients.values():
        np.testing.assert_array_equal(leaf, hvd.broadcast(leaf, 0))


def memory_copies(work: Callable[[], Any]) -> list[str]:
    """Return the names of the copies that CUDA makes meanwhile, in all threads."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.name.startswith("Memcpy")]


def repeated(reduce: Callable[..., Any], x: Any, codes: Any) -> Callable[[], None]:
    def work() -> None:
        for compression in (codes.none, codes.qsgd(bits=4, min_elements=0)):
            reduce(x, compression)

    work()  # what is loaded and allocated at first is not of interest
    work()
    return work


@needs_cupy
@pytest.mark.skipif(not has_device(), reason="torch's profiler is needed")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_no_array_of_cupy_passes_through_pageable_memory(cupy):
    x = cupy.ones(COUNT, cupy.float32)
    copies = memory_copies(
        repeated(lambda x, c: hvd.allreduce(x, op=hvd.Sum, compression=c), x, hvd.Compression)
    )
    assert copies, "nothing was recorded"
    assert not [name for name in copies if "Pageable" in name]


@needs_jax
@pytest.mark.skipif(not has_device(), reason="torch's profiler is needed")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_no_array_of_jax_passes_through_pageable_memory(jax, compiled):
    import qsgd_hpc.jax as hvd

    def program(compression: Any) -> Any:
        name = f"copied {compiled} {compression!r}"
        return lambda x: hvd.allreduce(x, op=hvd.Sum, compression=compression, name=name)

    programs: dict[str, Any] = {}

    def reduce(x: Any, compression: Any) -> None:
        made = program(compression)
        call = programs.setdefault(repr(compression), jax.jit(made) if compiled else made)
        jax.block_until_ready(call(x))

    x = jax.block_until_ready(jax.numpy.ones(COUNT))
    copies = memory_copies(repeated(reduce, x, hvd.Compression))
    assert copies, "nothing was recorded"
    assert not [name for name in copies if "Pageable" in name]
