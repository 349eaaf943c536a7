"""Train a small network on scikit-learn's digits with PyTorch, on many ranks.

    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc run -np 2 --bits 4 train_hvd.py     # gradients in 4 bits

This is train.py and eight steps, each marked where it happens.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import qsgd_hpc.torch as hvd

EPOCHS, BATCH, RATE = 5, 50, 0.1

# Step 1: init.
hvd.init()

torch.manual_seed(1)
# Step 2: pin the GPU.
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
device = "cuda" if torch.cuda.is_available() else "cpu"

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
y = torch.tensor(digits.target, device=device)
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
# Step 4: scale the learning rate, with a warm-up over the first epoch.
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(
    optimizer, 1 / hvd.size(), total_iters=len(x_train) // (BATCH * hvd.size())
)
# Step 5: wrap the optimizer.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
# Step 6: broadcast the initial state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(EPOCHS):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    # Step 3: shard the data, in equal parts.
    order = order[: len(order) // hvd.size() * hvd.size()]
    order = order[hvd.rank() :: hvd.size()]
    loss_sum, steps = torch.zeros((), device=device), 0
    for batch in order.split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
        loss.backward()
        optimizer.step()
        # Step 4 again: one step of the warm-up.
        warm_up.step()
        loss_sum += loss.detach()
        steps += 1
    # Step 8: average the metrics. Every rank tests on all test images, so `correct` is exact.
    train_loss = hvd.allreduce(loss_sum / steps, name="loss")
    correct = (model(x_test).argmax(1) == y_test).float().mean()
    # Step 7: let rank 0 alone print.
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}: {steps} steps, loss {train_loss:.4f}, test accuracy {correct:.2%}"
        )

# Step 7 again: and save.
if hvd.rank() == 0:
    torch.save(model.state_dict(), "digits.pt")
