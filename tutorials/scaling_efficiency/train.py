"""Train a network on all ranks and measure its steps; its images are noise.

qsgd-hpc scale --nodes 1,2 --bits 32,4 --batch-size 256 train.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import Meter

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch-size", type=int, help="images a step, all ranks together")
parser.add_argument("--batch-size", type=int, default=128, help="images a step and rank")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--width", type=int, default=1024, help="of each of the five hidden layers")
args = parser.parse_args()

hvd.init()
batch_size = args.global_batch_size or args.batch_size * hvd.size()
torch.manual_seed(1)
# A step takes as long on noise as on real images, and noise needs no download.
images, labels = torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
wide = args.width
hidden = [layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.ReLU())]
model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), *hidden, nn.Linear(wide, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

shard = slice(hvd.rank(), None, hvd.size())
meter = Meter(hvd, global_batch_size=batch_size, unit="images", dataset="noise")
for x, y in meter.steps([(images[shard], labels[shard])] * args.steps):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

told = meter.final()
if hvd.rank() == 0:
    print(f"{hvd.size()} rank(s): {told['throughput']:.0f} images/s")
