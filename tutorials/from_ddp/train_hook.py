"""Train on scikit-learn's digits with DistributedDataParallel, with 4-bit gradients.

torchrun --standalone --nproc-per-node 2 train_hook.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from qsgd_hpc.torch.ddp import compress

dist.init_process_group("gloo")
torch.manual_seed(1)

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
train_set = TensorDataset(x[:1500], y[:1500])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=50, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
model = DistributedDataParallel(model)
state = compress(model, bits=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)

for epoch in range(5):
    sampler.set_epoch(epoch)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    train_loss = torch.stack(losses).mean() / dist.get_world_size()
    dist.all_reduce(train_loss)
    correct = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {train_loss:.4f}, test accuracy {correct:.2%}")

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "digits.pt")
del model, optimizer, loss  # gloo may abort if they outlive the group
dist.destroy_process_group()
