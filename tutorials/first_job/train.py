"""Train a small network on scikit-learn's digits, on all ranks of a job.

qsgd-hpc submit --nodes 2 train.py --epochs 20
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn

import qsgd_hpc.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}", flush=True)

torch.manual_seed(1)
(images, labels), (test_images, test_labels) = load_digits()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(args.epochs):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(100):
        shard = batch[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[shard]), labels[shard], reduction="sum")
        loss /= len(batch) / hvd.size()  # the fair share: shards may differ by one image
        loss.backward()
        optimizer.step()

right = (model(test_images).argmax(1) == test_labels).sum().item()
if hvd.rank() == 0:
    print(f"lr {args.lr:g}: {right} of {len(test_labels)} test digits right")
