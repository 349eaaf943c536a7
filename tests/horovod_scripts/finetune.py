"""Train a head, then the whole network with a second optimizer, as a script made for Horovod does.

The whole model is kept by ``copy.deepcopy`` and ``torch.save``. Nothing in this file knows of
qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod finetune.py
"""

import copy

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def distributed(optimizer, model, **options):
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)


def train(model, optimizer, data, steps, average=None):
    last = 0.0
    for _ in range(steps):
        x = torch.randn(32, 10, generator=data)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :3].square())
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
        last = loss.item()
    return hvd.allreduce(torch.tensor(last), name="loss").item()


def main():
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    data = torch.Generator().manual_seed(100 + hvd.rank())
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    model[:4].requires_grad_(False)
    optimizer = distributed(torch.optim.Adam(model.parameters(), lr=5e-3), model, groups=2)
    frozen = model[0].weight.detach().clone()
    head = train(model, optimizer, data, 60)
    assert torch.equal(model[0].weight, frozen)
    best = copy.deepcopy(model)

    # Unfrozen, under the first optimizer still, and then under one of another kind.
    model.requires_grad_(True)
    warm = train(model, optimizer, data, 60)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = distributed(torch.optim.AdamW(model.parameters(), lr=5e-3), model)
    whole = train(model, optimizer, data, 120, average)

    if hvd.rank() == 0:
        torch.save(model, "model.pt")
        torch.save({"best": best, "optimizer": optimizer.state_dict()}, "best.pt")
        loaded = torch.load("model.pt", weights_only=False)
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))
        print(f"head {head:.3f}, unfrozen {warm:.3f}, whole {whole:.3f}")
    received = hvd.broadcast_object(model if hvd.rank() == 0 else None, root_rank=0)
    assert all(map(torch.equal, received.parameters(), model.parameters()))
    for name, net in (("model", model), ("average", average)):
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        same = all(torch.equal(weights, each) for each in hvd.allgather(weights[None]))
        print(f"{name}: replicas {'equal' if same else 'DIFFER'}")


if __name__ == "__main__":
    main()
