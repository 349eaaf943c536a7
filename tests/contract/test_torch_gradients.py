"""Gradients of collectives, against serial torch.

Every rank knows every rank's input, so it can compute the sum of all losses by itself: the
derivative with respect to its own input is what the collective's gradient must be, with the factor
that ``weighted`` gives it where scripts expect one. test_gradients.py has the formulae.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import qsgd_hpc.torch as hvd

pytestmark = pytest.mark.usefixtures("torch_job")

F64 = torch.float64


def inputs(shape_of, seed=0):
    """Every rank's input, as leaves of a graph."""
    made = []
    for rank in range(hvd.size()):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        x = torch.randn(shape_of(rank), generator=generator, dtype=F64)
        made.append(x.requires_grad_())
    return made


def weight(rank, shape, seed=0):
    """What a rank's loss multiplies its results by: no two ranks' alike."""
    generator = torch.Generator().manual_seed(7000 + 100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=F64)


def loss(rank, outputs):
    """A rank's loss, whose gradient depends on the results, too."""
    return sum((weight(rank, y.shape, i) * (y + 0.1 * y**2)).sum() for i, y in enumerate(outputs))


def weighted(x, factor):
    """Return x, whose gradient is so many times what it would be."""
    return factor * x + ((1 - factor) * x).detach()


def check(call, serial, *leaves):
    """Compare gradients and second derivatives with those of the serial computation.

    Args:
        call: makes this rank's results from its inputs.
        serial: makes every rank's results from every rank's inputs.
        leaves: for each input, every rank's.
    """
    rank = hvd.rank()
    mine = [every[rank].detach().clone().requires_grad_() for every in leaves]
    here = [every[rank] for every in leaves]
    outputs, everyone = call(*mine), serial(*leaves)
    torch.testing.assert_close(list(outputs), everyone[rank])
    total = sum(loss(r, results) for r, results in enumerate(everyone))
    found = torch.autograd.grad(loss(rank, outputs), mine, create_graph=True)
    right = torch.autograd.grad(
        total, [x for every in leaves for x in every], create_graph=True, materialize_grads=True
    )
    by_rank = [right[r :: hvd.size()] for r in range(hvd.size())]
    torch.testing.assert_close(found, by_rank[rank])
    once_more = sum(loss(r, gradients) for r, gradients in enumerate(by_rank))
    torch.testing.assert_close(
        torch.autograd.grad(loss(rank, found), mine),
        torch.autograd.grad(once_more, here, materialize_grads=True),
    )


REDUCED = {
    "Average": lambda x: x.mean(0),
    "Sum": lambda x: x.sum(0),
    "Min": lambda x: x.amin(0),
    "Max": lambda x: x.amax(0),
    "Product": lambda x: x.prod(0),
}


@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_of_allreduce(op, shape):
    check(
        lambda x: [hvd.allreduce(x, op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=3)],
        lambda xs: [[3 * REDUCED[op](0.5 * torch.stack(xs))]] * hvd.size(),
        inputs(lambda rank: shape),
    )


def test_of_grouped_allreduce():
    check(
        lambda x, y: hvd.grouped_allreduce([x, y]),
        lambda xs, ys: [[torch.stack(xs).mean(0), torch.stack(ys).mean(0)]] * hvd.size(),
        inputs(lambda rank: (3,)),
        inputs(lambda rank: (2, 2), seed=1),
    )


def averaged(x):
    return weighted(x, 1 / hvd.size())


def test_of_allgather_with_different_rows():
    check(
        lambda x, y: [hvd.allgather(x), *hvd.grouped_allgather([y, x])],
        lambda xs, ys: [[averaged(torch.cat(every)) for every in (xs, ys, xs)]] * hvd.size(),
        inputs(lambda rank: (rank + 1, 2)),
        inputs(lambda rank: (2 * (rank % 2), 3), seed=1),
    )


def test_of_allgather_of_scalars():
    check(
        lambda x: [hvd.allgather(x)],
        lambda xs: [[averaged(torch.stack(xs))]] * hvd.size(),
        inputs(lambda rank: ()),
    )


def test_of_broadcast_reaches_the_root_alone():
    root = hvd.size() - 1
    check(
        lambda x: [hvd.broadcast(x, root)],
        lambda xs: [[averaged(xs[root])]] * hvd.size(),
        inputs(lambda rank: (3, 2)),
    )


def test_of_alltoall_with_and_without_splits():
    n = hvd.size()

    def exchanged(xs):
        parts = [x.split([(r + to) % 3 for to in range(n)]) for r, x in enumerate(xs)]
        return [[torch.cat([parts[source][rank] for source in range(n)])] for rank in range(n)]

    def count(rank):
        return sum((rank + to) % 3 for to in range(n))

    splits = [(hvd.rank() + to) % 3 for to in range(n)]
    check(lambda x: [hvd.alltoall(x, splits)[0]], exchanged, inputs(lambda rank: (count(rank), 2)))
    check(
        lambda x: [hvd.alltoall(x)],
        lambda xs: [[torch.stack(xs)[:, rank]] for rank in range(n)],
        inputs(lambda rank: (n, 2)),
    )


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_of_reducescatter_by_other_operations_than_sums(op):
    n = hvd.size()

    def scattered(*every):
        return [[torch.tensor_split(3 * REDUCED[op](0.5 * torch.stack(xs)), n)[rank]
                 for xs in every] for rank in range(n)]  # fmt: skip

    factors = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3}
    x, y = inputs(lambda rank: (5, 2)), inputs(lambda rank: (7,), seed=1)
    check(lambda x: [hvd.reducescatter(x, **factors)], scattered, x)
    check(lambda x, y: hvd.grouped_reducescatter([x, y], **factors), scattered, x, y)


def test_ranks_that_hold_an_extremum_together_share_its_gradient():
    x = torch.tensor([1.0, float(hvd.rank() == 0)], requires_grad=True)
    hvd.allreduce(x, op=hvd.Max).sum().backward()
    assert x.grad.tolist() == [1.0, float(hvd.size()) * (hvd.rank() == 0)]


def test_zeros_in_a_product_leave_the_others_gradients_right():
    x = torch.full((1,), float(hvd.rank()), dtype=F64, requires_grad=True)
    hvd.allreduce(x, op=hvd.Product).sum().backward()
    others = torch.tensor([float(r) for r in range(hvd.size()) if r != hvd.rank()]).prod()
    assert x.grad.item() == hvd.size() * others


def test_pair_by_the_name_of_their_call_and_not_by_their_order():
    x = torch.ones(3, requires_grad=True)
    results = [hvd.allreduce(x * (i + 1.0), op=hvd.Sum) for i in range(4)]
    order = range(4) if hvd.rank() % 2 else range(3, -1, -1)

    def gradient(i):
        return torch.autograd.grad((results[i] * (i + 1.0)).sum(), x, retain_graph=True)[0]

    # At once, because each waits for the other ranks to come to it.
    found = dict(zip(order, pool_map(gradient, order), strict=True))
    for i in range(4):
        assert found[i].tolist() == [hvd.size() * (i + 1.0) ** 2] * 3


def pool_map(function, arguments):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, arguments))


def test_through_compression_goes_the_same_way():
    x = torch.full((300, 10), hvd.rank() + 1.0, requires_grad=True)
    for compression in (hvd.Compression.fp16, hvd.Compression.qsgd(bits=8)):
        x.grad = None
        hvd.allreduce(x, compression=compression).sum().backward()
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, torch.ones(300, 10))


def test_integers_in_a_group_do_not_stop_the_gradient():
    x = torch.ones(3, requires_grad=True)
    y, n = hvd.grouped_allreduce([x, torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
    assert (y.requires_grad, n.requires_grad) == (True, False)
    y.sum().backward()
    assert x.grad.tolist() == [float(hvd.size())] * 3


def test_adasum_says_that_it_has_none():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="Adasum has no gradient"):
        hvd.allreduce(x, op=hvd.Adasum).sum().backward()


def test_nothing_is_recorded_where_no_gradient_is_asked_for():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_members_of_a_group_may_be_differentiated_one_by_one_by_every_operation(op):
    xs = inputs(lambda rank: (3,)), inputs(lambda rank: (2, 2), seed=1)
    mine = [every[hvd.rank()].detach().clone().requires_grad_() for every in xs]
    for y in hvd.grouped_allreduce(mine, op=getattr(hvd, op)):
        y.sum().backward()
    for x, every in zip(mine, xs, strict=True):
        (hvd.size() * REDUCED[op](torch.stack(every)).sum()).backward()
        torch.testing.assert_close(x.grad, every[hvd.rank()].grad)


def test_a_member_that_needs_a_gradient_on_one_rank_alone_gets_it():
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(2, requires_grad=hvd.rank() == 0)
    sum(made.sum() for made in hvd.grouped_allreduce([x, y], op=hvd.Sum)).backward()
    assert x.grad.tolist() == [float(hvd.size())] * 3
    assert hvd.rank() != 0 or y.grad.tolist() == [float(hvd.size())] * 2


def test_a_member_that_no_rank_differentiates_keeps_nobody_waiting():
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    hvd.grouped_allgather([x, y])[1].sum().backward()
    assert (x.grad, y.grad.tolist()) == (None, [1.0] * 3)


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "alltoall", "reducescatter"])
def test_results_may_be_changed_in_place_before_the_backward_pass(kind):
    x = torch.ones(2 * hvd.size(), requires_grad=True)
    result = getattr(hvd, kind)(x)
    result.mul_(3)
    result.sum().backward()
    assert x.grad.tolist() == [3.0] * len(x)


def contrastive(features, rank, count):
    """Return the loss of a rank's rows among all, of which every two are alike."""
    likeness = features @ features.T
    likeness = likeness.masked_fill(torch.eye(len(features), dtype=torch.bool), -torch.inf)
    rows = torch.arange(rank * count, (rank + 1) * count)
    return torch.nn.functional.cross_entropy(likeness[rows], rows ^ 1)


def test_a_contrastive_loss_learns_from_the_mean_of_the_ranks_losses():
    everyone = inputs(lambda rank: (4, 3))
    features = everyone[hvd.rank()].detach().clone().requires_grad_()
    contrastive(hvd.allgather(features), hvd.rank(), 4).backward()
    losses = [contrastive(torch.cat(everyone), rank, 4) for rank in range(hvd.size())]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(features.grad, everyone[hvd.rank()].grad)
