"""Train on shares of unequal length with ``hvd.join``, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod uneven.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(5)
model = nn.Linear(6, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

x = torch.randn(40 * hvd.size() + 17, 6)
share = torch.utils.data.TensorDataset(x, (x[:, 0] > x[:, 1]).long())
first = 40 * hvd.rank()
last = first + 40 if hvd.rank() < hvd.size() - 1 else len(x)  # the last rank has more
loader = torch.utils.data.DataLoader(torch.utils.data.Subset(share, range(first, last)), 8)

for _ in range(10):
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    final = hvd.join()
    # A rank that has joined has not stepped since: all go on from the one that was last.
    hvd.broadcast_parameters(model.state_dict(), root_rank=final)
    hvd.broadcast_optimizer_state(optimizer, root_rank=final)

right = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
counted = hvd.allreduce(torch.tensor([right, last - first]), op=hvd.Sum, name="right")
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
same = all(torch.equal(weights, each) for each in hvd.allgather(weights[None]))
print(f"last {final}, {counted[0] / counted[1]:.2f} of {counted[1]} right, "
      f"replicas {'equal' if same else 'DIFFER'}")  # fmt: skip
