# A regression, written from top to bottom: no functions at all.
import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
np.random.seed(0)

EPOCHS = 5
BATCH = 16

X = np.random.randn(1000, 8).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + X.sum(1, keepdims=True)).astype("float32")
data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
train_data, val_data = random_split(data, [800, 200])

train_dl = DataLoader(train_data, BATCH, shuffle=True, drop_last=True)
val_dl = DataLoader(val_data, BATCH)

model = nn.Sequential(
    nn.Linear(8, 32),
    nn.BatchNorm1d(32),
    nn.ReLU(),
    nn.Dropout(0.1),   # a little
    nn.Linear(32, 1),
)
loss_fn = nn.MSELoss()
opt = optim.Adam(model.parameters())

best = float("inf")
for epoch in range(EPOCHS):
    model.train()
    running, seen = 0.0, 0
    for xb, yb in train_dl:
        opt.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        running += loss.item() * len(xb)
        seen += len(xb)

    model.eval()
    with torch.no_grad():
        val_losses = [loss_fn(model(xb), yb).item() for xb, yb in val_dl]
    val = sum(val_losses) / len(val_losses)
    # keep an eye on both
    print("epoch", epoch + 1, "loss", round(running / seen, 6))
    print("    validation:", round(val, 6))
    if val < best:
        best = val
        torch.save({"model": model.state_dict(), "epoch": epoch}, "qsgd_convert_best.pt")
print("best", best)
