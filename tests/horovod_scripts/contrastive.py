"""Learn an embedding by contrast with the samples of every rank, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod contrastive.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH = 16, 12

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3 + hvd.rank())
encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))
temperature = nn.Parameter(torch.tensor(0.1).log())
named = [*encoder.named_parameters(), ("temperature", temperature)]
optimizer = torch.optim.AdamW([p for _, p in named], lr=5e-3)
hvd.broadcast_parameters(named, root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)


def views():
    """Return two noisy views of each sample; half of the inputs are noise alone."""
    sample = torch.randn(BATCH, WIDTH // 2)
    noisy = (sample + 0.1 * torch.randn_like(sample) for _ in range(2))
    return [torch.cat([view, 3 * torch.randn(BATCH, WIDTH // 2)], 1) for view in noisy]


def contrast():
    """Return the loss of this rank's samples against those of all ranks, and how many are found."""
    queries, keys = (F.normalize(encoder(view)) for view in views())
    everyone = hvd.allgather(keys, name="keys")
    scores = queries @ everyone.T / temperature.exp()
    right = torch.arange(BATCH) + BATCH * hvd.rank()
    return F.cross_entropy(scores, right), (scores.argmax(1) == right).float().mean()


for step in range(301):
    optimizer.zero_grad()
    loss, found = contrast()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        loss, found = (hvd.allreduce(each.detach()).item() for each in (loss, found))
        if hvd.rank() == 0:
            print(f"step {step}: loss {loss:.3f}, found {found:.2f}")

weights = nn.utils.parameters_to_vector([p for _, p in named]).detach()
same = all(torch.equal(weights, each) for each in hvd.allgather(weights[None]))
print(f"replicas {'equal' if same else 'DIFFER'}")
