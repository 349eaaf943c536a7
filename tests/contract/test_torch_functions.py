"""Starting from one state, and sparse tensors, on any number of ranks; see conftest.py."""

from __future__ import annotations

import inspect

import pytest
import torch

import qsgd_hpc.torch as hvd

pytestmark = pytest.mark.usefixtures("torch_job")

KINDS = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
}


def made(name):
    """A matrix, which every optimizer takes, and its optimizer."""
    matrix = torch.nn.Parameter(torch.ones(4, 3))
    return matrix, KINDS[name]([matrix], lr=0.5 if hvd.rank() == 0 else 0.25)


def step(name, matrix, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = (matrix * torch.arange(12.0).reshape(4, 3)).sin().sum()
        loss.backward()
        if name == "SparseAdam":
            matrix.grad = matrix.grad.to_sparse()
        return loss

    optimizer.step(closure)


def comparable(value):
    """Tensors as lists, so that states compare with ``==``; NaN does not occur in them."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_the_state_of_every_optimizer_reaches_all_ranks(name, steps):
    matrix, optimizer = made(name)
    for _ in range(steps if hvd.rank() == 0 else 0):
        step(name, matrix, optimizer)
    hvd.broadcast_parameters([("matrix", matrix)])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=torch.nn.Module())
    assert optimizer.param_groups[0]["lr"] == 0.5
    states = hvd.allgather_object(comparable(optimizer.state_dict()))
    assert all(state == states[0] for state in states)
    keeps_state = name == "Adagrad" or (steps > 0 and name != "SGD")
    assert bool(states[0]["state"]) == keeps_state
    step(name, matrix, optimizer)
    assert torch.equal(matrix.data, hvd.broadcast(matrix.data, 0))


@pytest.mark.parametrize("name", KINDS)
def test_before_the_first_step_every_parameter_has_a_gradient(name):
    matrix, optimizer = made(name)
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    if name != "LBFGS":  # which takes one group only
        optimizer.add_param_group({"params": [frozen]})
    hvd.broadcast_optimizer_state(optimizer)
    if name == "SparseAdam":
        assert matrix.grad is None
    else:
        assert torch.equal(matrix.grad, torch.zeros(4, 3))
    assert frozen.grad is None
    matrix.grad = None
    step(name, matrix, optimizer)
    if name not in ("SGD", "LBFGS"):  # whose state does not tell
        matrix.grad = None
        hvd.broadcast_optimizer_state(optimizer)
        assert matrix.grad is None


def test_parameters_without_names_are_broadcast_in_order():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(hvd.rank() + 1)
    hvd.broadcast_parameters(model.parameters(), root_rank=0)
    assert all((parameter == 1).all() for parameter in model.parameters())


def test_parameters_of_a_set_start_from_its_root():
    if hvd.size() < 2:
        pytest.skip("one rank has its own state only")
    size = hvd.size()
    hvd.shutdown()
    both = [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, size))]
    hvd.init(process_sets=both)
    (mine,) = [each for each in both if each.included()]
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(hvd.rank())
    root = mine.ranks[-1]
    hvd.broadcast_parameters(model.state_dict(), root, process_set=mine)
    assert set(model.weight.flatten().tolist()) == {float(root)}
    hvd.shutdown()
    hvd.init()


def test_sparse_tensors_add_up_where_their_entries_meet():
    rank, size = hvd.rank(), hvd.size()
    # Row 0 on every rank, row rank+1 on this one alone; rank 0's row 0 in two entries.
    rows = [0, rank + 1, *([0] if rank == 0 else [])]
    values = torch.full((len(rows), 2), 2.0)
    mine = torch.sparse_coo_tensor([rows], values, (size + 1, 2), check_invariants=True)
    total = hvd.synchronize(hvd.sparse_allreduce_async(mine, name="rows", op=hvd.Sum))
    assert total.is_coalesced()
    right = torch.full((size + 1, 2), 2.0)
    right[0] = 2.0 * (size + 1)
    assert torch.equal(total.to_dense(), right)
    mean = hvd.sparse_allreduce_async(mine)()
    torch.testing.assert_close(mean.to_dense(), right / size)
    empty = torch.zeros(3, 3).to_sparse_coo()
    assert hvd.synchronize(hvd.sparse_allreduce_async(empty)).to_dense().sum() == 0
    if size > 1:
        unequal = torch.zeros(3 + rank, 3).to_sparse_coo()
        with pytest.raises(hvd.HorovodInternalError, match=r"\[4, 3\].*\[3, 3\]"):
            hvd.synchronize(hvd.sparse_allreduce_async(unequal, name="unequal"))
    with pytest.raises(ValueError, match="to_sparse_coo"):
        hvd.sparse_allreduce_async(torch.ones(3))
    with pytest.raises(ValueError, match="Average or"):
        hvd.sparse_allreduce_async(mine, op=hvd.Max)
    with pytest.raises(ValueError, match="sparse_allreduce_async"):
        hvd.allreduce(mine)


@pytest.mark.parametrize("what", [torch.ones(3), torch.nn.Linear(1, 1), "w", None])
def test_what_is_no_parameter_is_refused(what):
    with pytest.raises(ValueError, match=f"named_parameters.*not a {type(what).__name__}"):
        hvd.broadcast_parameters(what)
