"""Train on scikit-learn's digits on the ranks of qsgd-hpc run.

qsgd-hpc run -np 2 --bits 4 train_hvd.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import qsgd_hpc.torch as hvd

hvd.init()
torch.manual_seed(1)

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
train_set = TensorDataset(x[:1500], y[:1500])
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=50, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(5):
    sampler.set_epoch(epoch)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    train_loss = hvd.allreduce(torch.stack(losses).mean(), name="loss")
    correct = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {train_loss:.4f}, test accuracy {correct:.2%}")

if hvd.rank() == 0:
    torch.save(model.state_dict(), "digits.pt")
