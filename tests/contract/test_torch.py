"""What the operations of qsgd_hpc.torch promise, on any number of ranks.

Runs as plain ``pytest`` on one rank, and under ``qsgd-hpc run -np N python -m pytest`` on more:
every rank runs the same tests in the same order (``-x``: a rank that fails must stop the others).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qsgd_hpc.torch as hvd
from qsgd_hpc.errors import UsageError

pytestmark = pytest.mark.usefixtures("torch_job")

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def per_rank(shape, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def total(shape, dtype=torch.float32):
    return sum(per_rank(shape, r, torch.float64) for r in range(hvd.size())).to(dtype)


def test_ranks_are_numbered_within_and_across_nodes():
    assert 0 <= hvd.rank() < hvd.size()
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    facts = [hvd.broadcast_object((hvd.rank(), hvd.local_rank()), r) for r in range(hvd.size())]
    assert [rank for rank, _ in facts] == list(range(hvd.size()))


def test_init_twice_is_harmless():
    hvd.init()
    assert hvd.is_initialized()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (4, 5, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_sums_every_dtype_and_shape(dtype, shape):
    mine = per_rank(shape, hvd.rank(), dtype)
    kept = mine.clone()
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert result.dtype == dtype
    assert torch.equal(result, total(shape, dtype))
    assert torch.equal(mine, kept)


@pytest.mark.parametrize(
    "call",
    [
        hvd.allreduce, hvd.allreduce_async_, lambda x: hvd.grouped_allreduce([x]), hvd.allgather,
        lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter,
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [[1, 2], 1.5, np.ones(3), None], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_is_refused_with_the_remedy(call, value):
    expected = f"expected a torch.Tensor, not {type(value).__name__}; .*torch.as_tensor"
    with pytest.raises(UsageError, match=expected):
        call(value)


def test_in_place_and_asynchronous_forms_agree():
    shape = (33, 7)
    expected = total(shape) / hvd.size()
    plain = hvd.allreduce(per_rank(shape, hvd.rank()))
    in_place = per_rank(shape, hvd.rank())
    assert hvd.allreduce_(in_place) is in_place
    handles = [hvd.allreduce_async(per_rank(shape, hvd.rank()), name=f"a{i}") for i in range(5)]
    later = per_rank(shape, hvd.rank())
    handle = hvd.allreduce_async_(later)
    assert hvd.synchronize(handle) is later
    assert hvd.poll(handle)
    for result in [plain, in_place, later, *map(hvd.synchronize, reversed(handles))]:
        assert torch.allclose(result, expected)


def test_allreduce_takes_tensors_that_are_not_contiguous():
    mine = per_rank((6, 8), hvd.rank()).t()
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total((6, 8)).t())
    view = per_rank((6, 8), hvd.rank())[:, ::2]
    hvd.allreduce_(view, op=hvd.Sum)
    assert torch.equal(view, total((6, 8))[:, ::2])


def test_operations_and_factors():
    mine = torch.tensor([float(hvd.rank() + 1)])
    assert hvd.allreduce(mine, op=hvd.Max) == hvd.size()
    assert hvd.allreduce(mine, op=hvd.Min) == 1
    product = hvd.allreduce(mine, op=hvd.Product)
    assert product == torch.arange(1, hvd.size() + 1).prod()
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert scaled == hvd.size() * (hvd.size() + 1) / 2
    assert hvd.allreduce(mine, average=False) == scaled
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


# Twice w of normally distributed elements, and a quarter more.
LIMITS = {("qsgd", 2): 8.0, ("qsgd", 4): 0.1, ("qsgd", 8): 3e-4, ("eden", 1): 2.2, ("eden", 3): 0.1}


@pytest.mark.parametrize(("code", "bits"), LIMITS)
def test_compressed_allreduce_is_close_and_identical_on_all_ranks(code, bits):
    generator = torch.Generator().manual_seed(hvd.rank())
    mine = torch.randn(300, 100, generator=generator)
    exact = hvd.allreduce(mine)
    coded = hvd.allreduce(mine, compression=getattr(hvd.Compression, code)(bits=bits))
    nmse = ((coded - exact).norm() / exact.norm()) ** 2
    assert nmse < LIMITS[code, bits]
    assert torch.equal(coded, hvd.broadcast(coded, 0))
    if hvd.size() > 1:
        assert nmse > 0


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_sixteen_bit_compression_returns_the_original_type(compression):
    mine = per_rank((50,), hvd.rank())
    result = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
    assert result.dtype == torch.float32
    assert torch.equal(result, total((50,)))


def test_broadcast_forms():
    root = hvd.size() - 1
    mine = per_rank((4, 4), hvd.rank())
    assert torch.equal(hvd.broadcast(mine, root), per_rank((4, 4), root))
    assert torch.equal(mine, per_rank((4, 4), hvd.rank()))
    assert hvd.broadcast_(mine, root) is mine
    assert torch.equal(mine, per_rank((4, 4), root))
    flags = torch.tensor([hvd.rank() == root, True])
    assert hvd.broadcast(flags, root).tolist() == [True, True]
    with pytest.raises(ValueError, match="root_rank=99"):
        hvd.broadcast(mine, 99)


def test_broadcast_object_carries_anything_picklable():
    thing = {"rank": hvd.rank(), "text": "é" * 1000}
    assert hvd.broadcast_object(thing, root_rank=0)["rank"] == 0


def test_mistakes_are_answered_with_the_remedy():
    model = torch.nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="lacks 1 of the optimizer's 2"):
        hvd.DistributedOptimizer(inner, [("w", model.weight)])
    with pytest.raises(ValueError, match="duplicate names: w"):
        hvd.DistributedOptimizer(inner, [("w", model.weight), ("w", model.bias)])
    with pytest.raises(ValueError, match="1 to 8"):
        hvd.Compression.qsgd(bits=9)
    with pytest.raises(ValueError, match="multiple of 64"):
        hvd.Compression.qsgd(bucket_size=100)
    with pytest.raises(ValueError, match="cannot be reduced"):
        hvd.allreduce(torch.ones(3, dtype=torch.complex64))
    for splits in ([1.5] + [1] * (hvd.size() - 1), torch.full((hvd.size(), 1), 1)):
        with pytest.raises(ValueError, match="one non-negative number of rows per rank"):
            hvd.alltoall(torch.ones(hvd.size()), splits=splits)


def test_compiled_functions_are_split_at_collectives():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend)
    def total(x):
        return hvd.allreduce(x * 2, op=hvd.Sum) + 1

    for _ in range(3):
        assert total(torch.ones(2)).tolist() == [2.0 * hvd.size() + 1] * 2
    assert len(graphs) == 2


def test_handles_may_be_dropped():
    """Fire and forget: the tensors live on until the engine has done with them."""
    for i in range(200):
        hvd.allreduce_async_(torch.ones(10_000), name=f"dropped{i}")
        hvd.allreduce_async(torch.ones(10_000), name=f"gone{i}")
    hvd.barrier()


def test_narrow_integers_average_without_wrapping():
    assert hvd.allreduce(torch.tensor([200, 100], dtype=torch.uint8)).tolist() == [200, 100]
    big = torch.iinfo(torch.int32).max
    assert hvd.allreduce(torch.tensor([big], dtype=torch.int32)).item() == big


def test_booleans_stay_booleans():
    mine = torch.tensor([True, hvd.rank() == 0, False])
    some, every = hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce(mine, op=hvd.Product)
    assert some.tolist() == [True, True, False]
    assert every.tolist() == [True, hvd.size() == 1, False]
    assert some.view(torch.uint8).max() == 1
    with pytest.raises(ValueError, match="no average"):
        hvd.allreduce(mine)


def test_complex_tensors_can_be_broadcast():
    mine = torch.tensor([1 + 2j, hvd.rank() - 1j])
    assert hvd.broadcast(mine, 0).tolist() == [1 + 2j, -1j]


def test_shutdown_and_init_again():
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def test_answers_too_long_to_be_sent_at_once_arrive_before_the_ranks_sum():
    """Sums in shared memory send nothing on; an answer under way would wait for ever."""
    for turn in range(20):  # names are sent whole the first time that they are used
        names = [f"{turn:02}.{i:03}.{'long' * 50}" for i in range(300)]
        handles = [hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum) for name in names]
        for handle in handles:
            assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))
