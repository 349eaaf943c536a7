"""Every form of torch's collectives, on tensors however they lie in memory; see test_torch.py."""

from __future__ import annotations

import pytest
import torch

import qsgd_hpc.torch as hvd

pytestmark = pytest.mark.usefixtures("torch_job")


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(numel, dtype=torch.float32).reshape(shape) + 100 * rank


def of_all(*shape: int) -> list[torch.Tensor]:
    return [of_rank(rank, *shape) for rank in range(hvd.size())]


def mine(*shape: int) -> torch.Tensor:
    return of_rank(hvd.rank(), *shape)


def sum_of_all(*shape: int) -> torch.Tensor:
    return torch.stack(of_all(*shape)).sum(0)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, -x], dim=-1)[..., 0]


def expanded(x: torch.Tensor) -> torch.Tensor:
    """One row for all: its strides are 0."""
    return x[:1].expand(x.shape)


LAYOUTS = pytest.mark.parametrize(
    "layout", [channels_last, transposed, every_second, expanded], ids=lambda f: f.__name__
)


@LAYOUTS
def test_any_layout_travels(layout):
    shape = (2 * hvd.size(), 3, 4, 5)
    x, every = layout(mine(*shape)), [layout(x) for x in of_all(*shape)]
    kept = x.clone()
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.stack(every).sum(0))
    assert torch.equal(hvd.allgather(x), torch.cat(every))
    assert torch.equal(hvd.broadcast(x, hvd.size() - 1), every[-1])
    rows = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    received, splits = hvd.alltoall(x, torch.full((hvd.size(),), 2))
    assert torch.equal(received, torch.cat([other[rows] for other in every]))
    assert splits.tolist() == [2] * hvd.size()
    assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), torch.stack(every).sum(0)[rows])
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "layout", [channels_last, transposed, every_second], ids=lambda f: f.__name__
)
def test_in_place_forms_keep_the_layout(layout):
    shape = (2, 3, 4, 5)
    reduced, sent = layout(mine(*shape)), layout(mine(*shape))
    strides = reduced.stride(), sent.stride()
    assert hvd.allreduce_(reduced, op=hvd.Sum) is reduced
    assert hvd.broadcast_(sent, 0) is sent
    assert torch.equal(reduced, sum_of_all(*shape))
    assert torch.equal(sent, of_rank(0, *shape))
    assert (reduced.stride(), sent.stride()) == strides


def test_gradients_of_a_channels_last_model_are_averaged():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    alone = torch.nn.Conv2d(3, 4, 3)
    alone.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    reference = torch.optim.SGD(alone.parameters(), lr=0.01)
    images = [channels_last(x / 500) for x in of_all(2, 3, 8, 8)]
    for _ in range(3):
        optimizer.zero_grad()
        model(images[hvd.rank()]).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        sum(alone(x).square().mean() for x in images).div(hvd.size()).backward()
        reference.step()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


def test_groups_in_all_their_forms():
    shapes = [(hvd.size(), 2), (2 * hvd.size(),)]
    sums = [sum_of_all(*shape) for shape in shapes]

    in_place = [mine(*shape) for shape in shapes]
    for result, x, right in zip(
        hvd.grouped_allreduce_(in_place, op=hvd.Sum), in_place, sums, strict=True
    ):
        assert result is x
        assert torch.equal(x, right)

    in_place = [mine(*shape) for shape in shapes]
    handle = hvd.grouped_allreduce_async_(in_place, name="in place", op=hvd.Sum)
    hvd.synchronize(handle)
    assert all(torch.equal(x, right) for x, right in zip(in_place, sums, strict=True))

    tensors = [mine(*shape) for shape in shapes]
    gathers = hvd.grouped_allgather_async(tensors, name="gather")
    shares = hvd.grouped_reducescatter_async(tensors, name="share", op=hvd.Sum)
    for result, shape in zip(hvd.synchronize(gathers), shapes, strict=True):
        assert torch.equal(result, torch.cat(of_all(*shape)))
    for result, right in zip(hvd.synchronize(shares), sums, strict=True):
        assert torch.equal(result, right.chunk(hvd.size())[hvd.rank()])
    assert hvd.poll(gathers)


def test_a_layer_may_be_frozen_thawed_and_frozen_again():
    """One process with the whole batch freezes the same layer at the same steps."""
    torch.manual_seed(1)

    def make():
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

    model, alone = make(), make()
    alone.load_state_dict(model.state_dict())
    model.load_state_dict(hvd.broadcast_object(model.state_dict(), 0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    batches = [x / 100 for x in of_all(5, 4)]
    for step in range(9):
        for each in (model, alone):
            each[0].requires_grad_(step % 3 == 1)
        optimizer.zero_grad()
        model(batches[hvd.rank()]).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        sum(alone(x).square().mean() for x in batches).div(hvd.size()).backward()
        reference.step()
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_parameter_may_get_data_of_another_shape(bits, groups):
    """As an embedding that gets more words, or a layer that is pruned."""
    rows = torch.nn.Parameter(torch.zeros(2, 64))
    other = torch.nn.Parameter(torch.zeros(3))
    compression = hvd.Compression.qsgd(bits, rules=f"rows={bits}") if bits else None
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([rows, other], lr=1.0),
        [("rows", rows), ("other", other)],
        compression=compression,
        op=hvd.Sum,
        groups=groups,
    )
    total = sum(range(1, hvd.size() + 1))
    for count in (2, 5, 1, 2):
        optimizer.zero_grad()
        rows.data = torch.zeros(count, 64)
        ((1 + hvd.rank()) * (rows.sum() + other.sum())).backward()
        optimizer.step()
        # A bucket of equal elements is coded exactly.
        assert torch.equal(rows.data, torch.full((count, 64), -float(total)))


def test_ranks_with_fewer_batches_join_and_the_others_train_on():
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    batches = 2 + 3 * hvd.rank()
    for _ in range(batches):
        optimizer.zero_grad()
        model(mine(3, 4) / 100).square().mean().backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    # The last one has made every step; what it has is what Horovod's users broadcast after join().
    hvd.broadcast_parameters(model.state_dict(), last)
    optimizer.zero_grad()
    model(mine(3, 4) / 100).square().mean().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))


def test_a_rank_may_join_before_all_gradients_are_known():
    """Rank 0 has no batch in the first epoch, and no batch of any rank uses the last layer."""
    torch.manual_seed(2)
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)])
    table = torch.nn.Embedding(6, 4, sparse=True)
    model = torch.nn.ModuleList([layers, table])
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=True
    )
    for epoch in range(2):
        for _ in range(2 * (hvd.rank() if epoch == 0 else 1)):
            optimizer.zero_grad()
            loss = layers[0](table(torch.tensor([hvd.rank(), 5]))).square().mean()
            loss.backward()
            hvd.allreduce(loss.detach())  # without a name: paired by the order of the calls
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        assert hvd.allgather(torch.zeros(1)).shape == (hvd.size(),)
    before = model.state_dict()["0.0.weight"].clone()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        layers[0](table(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert not torch.equal(before, layers[0].weight)
    for parameter in model.parameters():
        assert torch.equal(parameter.data, hvd.broadcast(parameter.data, 0))
