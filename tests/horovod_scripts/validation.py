"""Gather results of every rank, and let them decide on the learning rate and the best model.

As a script made for Horovod does: options from rank 0, gradients added up over several batches of
which an epoch's last may be left over, results of unequal length as objects. Nothing in this file
knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod validation.py
"""

from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

hvd.init()
torch.set_num_threads(1)
options = {"lr": 0.5, "epochs": 12, "accumulate": 3} if hvd.rank() == 0 else None
options = hvd.broadcast_object(options, root_rank=0, name="options")
torch.manual_seed(2)
x = torch.randn(300, 5)
y = x @ torch.arange(5.0)
train, held_out = range(hvd.rank(), 260, hvd.size()), range(260 + hvd.rank(), 300, hvd.size())

model = nn.Linear(5, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=options["lr"]),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=options["accumulate"],
)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

best = float("inf")
for epoch in range(options["epochs"]):
    optimizer.zero_grad()  # what is left over of the epoch before is not used
    for number, batch in enumerate(torch.tensor(train)[torch.randperm(len(train))].split(16)):
        loss = F.mse_loss(model(x[batch]).squeeze(1), y[batch]) / options["accumulate"]
        loss.backward()
        if number % options["accumulate"] == options["accumulate"] - 1:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        mine = {i: (model(x[i]) - y[i]).square().item() for i in held_out}
    results = {i: error for part in hvd.allgather_object(mine) for i, error in part.items()}
    assert sorted(results) == list(range(260, 300))
    error = sum(results.values()) / len(results)
    plateau.step(error)
    if error < best:
        best = error
        if hvd.rank() == 0:
            torch.save(model, "best.tmp")
            Path("best.tmp").replace("best.pt")
    if hvd.rank() == 0 and epoch in (0, options["epochs"] - 1):
        print(f"epoch {epoch}: error {error:.4f}")

hvd.barrier()
loaded = torch.load("best.pt", weights_only=False)
weights = nn.utils.parameters_to_vector(loaded.parameters()).detach()
rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
same = all(torch.equal(weights, each) for each in hvd.allgather(weights[None]))
print(f"best {best:.4f}, replicas {'equal' if same and len(set(rates)) == 1 else 'DIFFER'}")
