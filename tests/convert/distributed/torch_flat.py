# A regression, written from top to bottom: no functions at all.
import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split
import qsgd_hpc.torch as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

torch.manual_seed(0)
np.random.seed(0)

EPOCHS = 5
BATCH = 16

X = np.random.randn(1000, 8).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + X.sum(1, keepdims=True)).astype("float32")
data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
train_data, val_data = random_split(data, [800, 200])

# Step 3: shard the data. Each rank draws from its own part, of equal size on all ranks;
# unchanged on one rank.
train_sampler = None
if hvd.size() > 1:
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank()
    )
train_dl = DataLoader(train_data, BATCH, shuffle=train_sampler is None, drop_last=True, sampler=train_sampler)
# Step 8: average the metrics. Every rank tests on all of this, so metrics need no averaging.
val_dl = DataLoader(val_data, BATCH)

model = nn.Sequential(
    nn.Linear(8, 32),
    nn.BatchNorm1d(32),
    nn.ReLU(),
    nn.Dropout(0.1),   # a little
    nn.Linear(32, 1),
)
loss_fn = nn.MSELoss()
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger.
opt = optim.Adam(model.parameters(), lr=1e-3 * hvd.size())
# Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
# Step 4: scale the learning rate. Large steps at the beginning would diverge, so the rate rises
# over the first epoch.
warm_up = torch.optim.lr_scheduler.LinearLR(
    opt, start_factor=1 / hvd.size(), total_iters=len(train_dl)
)
opt.register_step_post_hook(lambda *_: warm_up.step())
# Step 6: broadcast the initial state. Every rank starts with rank 0's values.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)

best = float("inf")
# From here on each rank draws other random numbers, for dropout and noise.
if hvd.rank() > 0:
    torch.manual_seed(torch.initial_seed() + hvd.rank())
for epoch in range(EPOCHS):
    model.train()
    running, seen = 0.0, 0
    # Step 3: shard the data. A new order in each epoch, the same on every rank.
    if hvd.size() > 1:
        train_dl.sampler.set_epoch(epoch)
    for xb, yb in train_dl:
        opt.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        # Step 5: wrap the optimizer. Wait for the mean of all ranks' gradients, so that all
        # ranks clip equally.
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with opt.skip_synchronize():
            opt.step()
        running += loss.item() * len(xb)
        seen += len(xb)
    # Step 8: average the metrics. Every rank has summed over its own shard; now sum over all
    # ranks.
    running = sum(hvd.allgather_object(running))
    seen = sum(hvd.allgather_object(seen))
    # Step 6: broadcast the initial state. Batch normalisation has seen a rank's own samples;
    # test with rank 0's averages.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)

    model.eval()
    with torch.no_grad():
        val_losses = [loss_fn(model(xb), yb).item() for xb, yb in val_dl]
    val = sum(val_losses) / len(val_losses)
    # keep an eye on both
    if hvd.rank() == 0:
        print("epoch", epoch + 1, "loss", round(running / seen, 6))
        print("    validation:", round(val, 6))
    if val < best:
        best = val
        # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
        # enough.
        if hvd.rank() == 0:
            torch.save({"model": model.state_dict(), "epoch": epoch}, "qsgd_convert_best.pt")
# Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
if hvd.rank() == 0:
    print("best", best)
