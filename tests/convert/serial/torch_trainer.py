"""The Trainer-class style: everything hangs on self."""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger(__name__)


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 6
    batch_size: int = 25
    weight_decay: float = 1e-4


class Spiral(Dataset):
    """Two arms."""

    def __init__(self, n):
        t = torch.linspace(0.3, 3, n // 2)
        arm = torch.stack([t * torch.cos(2 * t), t * torch.sin(2 * t)], 1)
        self.x = torch.cat([arm, -arm])
        self.y = torch.cat([torch.zeros(n // 2), torch.ones(n // 2)]).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Trainer:
    def __init__(self, config):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(self.device)
        self.train_loader = DataLoader(
            Spiral(600),
            batch_size=config.batch_size,
            shuffle=True,
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr,
            momentum=0.9,
            weight_decay=config.weight_decay,  # a bit
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=config.epochs
        )

    def train_one_epoch(self):
        self.model.train()
        total = 0.0
        correct = 0
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            out = self.model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * y.size(0)
            correct += (out.argmax(1) == y).sum().item()
        n = len(self.train_loader.dataset)
        return total / n, correct / n

    def fit(self):
        for epoch in range(self.config.epochs):
            loss, acc = self.train_one_epoch()
            self.scheduler.step()
            logger.info("epoch %d loss %.6f acc %.3f", epoch, loss, acc)
            print(f"epoch {epoch} loss {loss:.6f}")

    def save(self, path):
        torch.save(self.model.state_dict(), path)


def main():
    torch.manual_seed(42)
    trainer = Trainer(Config())
    trainer.fit()
    trainer.save("qsgd_convert_trainer.pt")


if __name__ == "__main__":
    main()
