"""Train with a class of its own that resumes from checkpoints, with all eight steps."""

from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import CrossEntropyLoss, Linear
from torch.optim import Adam
from torch.utils.data import DataLoader, Subset


def is_chief():
    return hvd.rank() == 0


class Trainer:
    def __init__(self, data, checkpoint):
        self.rank = hvd.rank()
        part = Subset(data, range(self.rank, len(data), hvd.size()))
        self.loader = DataLoader(part, batch_size=16, shuffle=True, drop_last=True)
        self.model = Linear(8, 2)
        self.loss = CrossEntropyLoss()
        self.optimizer = hvd.DistributedOptimizer(
            Adam(self.model.parameters(), lr=1e-3 * hvd.size()),
            named_parameters=self.model.named_parameters(),
        )
        self.checkpoint = Path(checkpoint)
        if self.rank == 0 and self.checkpoint.exists():
            state = torch.load(self.checkpoint)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def train_epoch(self):
        total = 0.0
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(self.loader)), name="loss")
        if self.rank != 0:
            return
        print(f"loss {mean:.4f}")

    def save(self):
        if not is_chief():
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.checkpoint)


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    trainer = Trainer(torch.load("data.pt"), "trained.pt")
    for _ in range(5):
        trainer.train_epoch()
        trainer.save()
