"""Train a tower on half of the ranks each and a head on all, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 4 --horovod process_sets.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

halves = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
hvd.init(process_sets=halves)
assert hvd.size() == 4
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
half = next(each for each in halves if each.included())
tower, head = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 2)
root = half.ranks[0]
hvd.broadcast_parameters(tower.state_dict(), root_rank=root, process_set=half)
hvd.broadcast_parameters(head.state_dict(), root_rank=0)
optimizers = [
    hvd.DistributedOptimizer(
        torch.optim.Adam(part.parameters(), lr=1e-2),
        named_parameters=[(f"{name}.{n}", p) for n, p in part.named_parameters()],
        process_set=process_set,
    )
    for name, part, process_set in (
        ("tower", tower, half),
        ("head", head, hvd.global_process_set),
    )
]

for step in range(81):
    x = torch.randn(16, 8)
    labels = (x[:, 0] * x[:, 1] > 0).long()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.cross_entropy(head(tower(x)), labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    if step % 80 == 0:
        loss = hvd.allreduce(loss.detach(), name="loss", process_set=half).item()
        if half.rank() == 0:
            print(f"ranks {half.ranks}, step {step}: loss {loss:.3f}")


def equal(part, process_set):
    weights = nn.utils.parameters_to_vector(part.parameters()).detach()
    everyone = hvd.allgather(weights[None], process_set=process_set)
    return all(torch.equal(weights, each) for each in everyone)


towers = equal(tower, half), equal(tower, hvd.global_process_set)
print(f"head equal: {equal(head, hvd.global_process_set)}, tower equal in half, in all: {towers}")
