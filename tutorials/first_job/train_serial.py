"""Train a small network on scikit-learn's digits, in one process.

python train_serial.py --epochs 20
"""

import argparse

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(1)
(images, labels), (test_images, test_labels) = load_digits()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for epoch in range(args.epochs):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

right = (model(test_images).argmax(1) == test_labels).sum().item()
print(f"lr {args.lr:g}: {right} of {len(test_labels)} test digits right")
