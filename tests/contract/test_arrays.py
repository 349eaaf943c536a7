"""Arrays of any origin, read through DLPack or the buffer protocol; see conftest.py."""

from __future__ import annotations

import array
import ctypes
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import qsgd_hpc.arrays as hvd
from qsgd_hpc.arrays._memory import CallArrays
from tests.processes import until


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()


def total():
    """What the ranks' numbers, counted from 1, add up to."""
    return hvd.size() * (hvd.size() + 1) / 2


class Producer:
    """An array that can do nothing but tell where its memory is."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class OnDevice(Producer):
    """The same, on a GPU that numpy cannot reach."""

    def __dlpack__(self, **options):
        raise BufferError("not on this device")

    def __dlpack_device__(self):
        return 2, 0

    def __array__(self, *arguments, **options):
        raise AssertionError("must not be copied behind the script's back")


MAKERS = (
    np.array,
    lambda values: Producer(np.array(values)),
    lambda values: array.array("d", values),
    lambda values: memoryview(array.array("d", values)),
    lambda values: (ctypes.c_double * len(values))(*values),
    list,
)
ORIGINS = ("numpy", "DLPack", "array.array", "memoryview", "ctypes", "list")


@pytest.mark.parametrize("make", MAKERS, ids=ORIGINS)
def test_any_origin_of_an_array_is_reduced_and_moved(make):
    mine = make([hvd.rank() + 1.0, 2.0])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [total(), 2 * hvd.size()]
    ranks = [x for r in range(hvd.size()) for x in (r + 1.0, 2.0)]
    assert hvd.allgather(mine).tolist() == ranks
    assert hvd.broadcast(mine, hvd.size() - 1).tolist() == [hvd.size(), 2.0]


@pytest.mark.parametrize("make", MAKERS[:-1], ids=ORIGINS[:-1])
def test_any_array_that_shows_its_memory_is_replaced(make):
    mine = make([hvd.rank() + 1.0, 2.0])
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert list(getattr(mine, "values", mine)) == [total(), 2 * hvd.size()]


def test_tensors_of_torch_are_replaced_without_a_copy():
    torch = pytest.importorskip("torch")
    mine = torch.full((3,), hvd.rank() + 1.0)
    group = [mine, np.full(2, 1.0)]
    assert hvd.grouped_allreduce_(group, op=hvd.Sum)[0] is mine
    assert mine.tolist() == [total()] * 3
    assert group[1].tolist() == [hvd.size()] * 2
    assert hvd.broadcast_(mine.fill_(hvd.rank()), 0) is mine
    assert mine.tolist() == [0.0] * 3


def test_arrays_with_gaps_are_replaced_in_their_place():
    whole = np.zeros((4, 6))
    whole[:, ::2] = hvd.rank() + 1
    hvd.allreduce_(whole[:, ::2], op=hvd.Sum)
    assert (whole[:, ::2] == total()).all()
    assert (whole[:, 1::2] == 0).all()
    whole[1] = hvd.rank()
    hvd.broadcast_(whole.T[::2], hvd.size() - 1)
    assert (whole[1, ::2] == hvd.size() - 1).all()
    assert (whole[1, 1::2] == hvd.rank()).all()


def test_the_core_gets_no_unaligned_numbers():
    mine = np.zeros(25, np.uint8)[1:].view(np.float64)
    assert not mine.flags.aligned
    assert CallArrays().readable(mine).flags.aligned
    mine[:] = hvd.rank() + 1
    assert hvd.allreduce_(mine, op=hvd.Sum).tolist() == [total()] * 3
    assert mine.tolist() == [total()] * 3


def test_integers_that_travel_wider_come_back_in_place():
    mine = np.full(3, 100 + hvd.rank(), np.uint8)
    hvd.allreduce_(mine, op=hvd.Average)
    assert mine.tolist() == [100 + (hvd.size() - 1) // 2] * 3


@pytest.mark.parametrize("dtype", ["complex64", "uint64", "datetime64[s]", "S7"])
def test_types_without_arithmetic_here_are_moved_all_the_same(dtype):
    mine = np.arange(3).astype(dtype)
    assert np.array_equal(hvd.allgather(mine)[-3:], mine)
    assert hvd.broadcast(mine, 0).dtype == mine.dtype
    with pytest.raises(ValueError, match="cannot be reduced; convert it to one of bfloat16"):
        hvd.allreduce(mine, op=hvd.Sum)


def test_what_cannot_be_replaced_is_refused():
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for mine, why in (
        (frozen, "ndarray is read-only; use allreduce,"),
        (b"abc", "bytes is read-only"),
        ([1.0], "list does not expose its memory"),
        (np.float32(1), "is read-only"),
    ):
        with pytest.raises(ValueError, match=why):
            hvd.allreduce_(mine)
    with pytest.raises(ValueError, match="broadcast_ replaces its argument"):
        hvd.broadcast_([1.0], 0)


def test_what_has_no_meaning_elsewhere_is_refused():
    with pytest.raises(ValueError, match="allgather_object"):
        hvd.allgather(np.array([{}]))
    with pytest.raises(ValueError, match="copy in host memory"):
        hvd.allreduce(OnDevice(np.zeros(3)))
    masked = np.ma.masked_equal([1.0, 1e20], 1e20)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
        with pytest.raises(ValueError, match="without its mask"):
            call(masked)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "qsgd", "eden"])
def test_compression_of_a_gradient(compression):
    if compression == "bf16":
        pytest.importorskip("ml_dtypes")
    chosen = getattr(hvd.Compression, compression)
    mine = np.random.default_rng(hvd.rank()).standard_normal(4096).astype(np.float32)
    options = {"compression": chosen if "16" in compression else chosen(bits=8)}
    found = hvd.allreduce(mine, "compressed", **options)
    exact = hvd.allreduce(mine)
    assert found.dtype == np.float32
    assert np.square(found - exact).sum() <= 1e-3 * np.square(exact).sum()
    if hvd.size() > 1:
        assert (found != exact).any()
    with pytest.raises(ValueError, match=r"use Compression\.none"):
        hvd.allreduce(mine, op=hvd.Max, compression=hvd.Compression.qsgd(bits=4))


def thread_names():
    names = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended since
            names.add((thread / "comm").read_text().strip())
    return names


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no threads are listed here")
def test_the_engines_thread_tells_whose_it_is():
    until(lambda: "qsgd-engine" in thread_names())


def test_ranks_may_have_their_numbers_in_different_byte_orders():
    order = "<>"[hvd.rank() % 2]
    mine = np.arange(3, dtype=f"{order}i4") + 256 * hvd.rank()
    everyone = np.concatenate([np.arange(3) + 256 * rank for rank in range(hvd.size())])
    np.testing.assert_array_equal(hvd.allgather(mine), everyone)
    kept = np.full(3, 7, f"{order}f8") if hvd.rank() == 0 else np.zeros(3, f"{order}f8")
    hvd.broadcast_(kept, 0)
    np.testing.assert_array_equal(kept, 7)
    np.testing.assert_array_equal(hvd.allreduce(np.ones(3, f"{order}f4"), op=hvd.Sum), hvd.size())
    moment = np.datetime64("2024-01-01T00:00")
    np.testing.assert_array_equal(hvd.allgather(moment), np.full(hvd.size(), moment))
