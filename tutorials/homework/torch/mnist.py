"""The homework's starting point in PyTorch: MNIST in one process.

Run: python mnist.py
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where to save the weights, *.pt")
args = parser.parse_args()

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
name, *arrays = homework_data.load(args.images)
print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = (torch.tensor(array, device=device) for array in arrays)
# PyTorch's convolutions want the channel first.
x_train, x_test = x_train.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(800, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

for epoch in range(args.epochs):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    train_loss, train_correct = 0.0, 0
    for batch in order.split(args.batch_size):
        optimizer.zero_grad()
        logits = model(x_train[batch])
        loss = F.cross_entropy(logits, y_train[batch])
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * len(batch)
        train_correct += (logits.argmax(1) == y_train[batch]).sum().item()
    test_loss, test_correct = 0.0, 0
    with torch.no_grad():
        for batch in torch.arange(len(x_test)).split(500):
            logits = model(x_test[batch])
            test_loss += F.cross_entropy(logits, y_test[batch], reduction="sum").item()
            test_correct += (logits.argmax(1) == y_test[batch]).sum().item()
    print(
        f"epoch {epoch + 1}  loss {train_loss / len(x_train):.4f}  "
        f"accuracy {train_correct / len(x_train):.4f}  test loss {test_loss / len(x_test):.4f}  "
        f"test accuracy {test_correct / len(x_test):.4f}"
    )
    if args.checkpoint:
        torch.save(model.state_dict(), args.checkpoint)
