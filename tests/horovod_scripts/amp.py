"""Train in mixed precision with a loss scaler and clipped gradients, as made for Horovod.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod amp.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=hvd.Average,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)

for step in range(60):
    x = torch.randn(32, 20)
    labels = x[:, :4].argmax(1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), labels)
    if step == 30 and hvd.rank() == hvd.size() - 1:
        loss = loss * float("inf")  # one rank overflows, and all must skip the step
    scaler.scale(loss).backward()
    if step % 2:  # with clipping, in Horovod's way
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step in (0, 59):
        loss = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"step {step}: loss {loss:.3f}")

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
same = all(torch.equal(weights, each) for each in hvd.allgather(weights[None]))
print(f"replicas {'equal' if same else 'DIFFER'}, scale {scaler.get_scale():.0f}")
