"""Train a small network on scikit-learn's digits with PyTorch, in one process.

    python train.py

train_hvd.py is this script for many ranks: compare the two with `diff`.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

EPOCHS, BATCH, RATE = 5, 50, 0.1

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
y = torch.tensor(digits.target, device=device)
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

for epoch in range(EPOCHS):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    loss_sum, steps = torch.zeros((), device=device), 0
    for batch in order.split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        steps += 1
    train_loss = loss_sum / steps
    correct = (model(x_test).argmax(1) == y_test).float().mean()
    print(f"epoch {epoch + 1}: {steps} steps, loss {train_loss:.4f}, test accuracy {correct:.2%}")

torch.save(model.state_dict(), "digits.pt")
