"""The Trainer-class style: everything hangs on self."""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import qsgd_hpc.torch as hvd

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
        # Step 3: shard the data. Each rank draws from its own part, of equal size on all ranks;
        # unchanged on one rank.
        self.train_samples = Spiral(600)
        self.train_sampler = None
        if hvd.size() > 1:
            self.train_sampler = torch.utils.data.distributed.DistributedSampler(
                self.train_samples, num_replicas=hvd.size(), rank=hvd.rank()
            )
        self.train_loader = DataLoader(
            self.train_samples,
            batch_size=config.batch_size,
            shuffle=self.train_sampler is None, sampler=self.train_sampler,
        )
        # Step 4: scale the learning rate. A batch hvd.size() times larger needs steps
        # hvd.size() times larger.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr * hvd.size(),
            momentum=0.9,
            weight_decay=config.weight_decay,  # a bit
        )
        # Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )
        # Step 4: scale the learning rate. Large steps at the beginning would diverge, so the
        # rate rises over the first epoch.
        warm_up = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1 / hvd.size(), total_iters=len(self.train_loader)
        )
        self.optimizer.register_step_post_hook(lambda *_: warm_up.step())
        # Step 6: broadcast the initial state. Every rank starts with rank 0's values.
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=config.epochs
        )

    def train_one_epoch(self):
        self.model.train()
        total = 0.0
        correct = 0
        # Step 3: shard the data. A new order in each epoch, the same on every rank.
        if hvd.size() > 1:
            self.train_loader.sampler.set_epoch(self.train_loader.sampler.epoch + 1)
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            out = self.model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * y.size(0)
            correct += (out.argmax(1) == y).sum().item()
        # Step 8: average the metrics. Every rank has summed over its own shard; now sum over
        # all ranks.
        total = sum(hvd.allgather_object(total))
        correct = sum(hvd.allgather_object(correct))
        n = len(self.train_loader.dataset)
        return total / n, correct / n

    def fit(self):
        for epoch in range(self.config.epochs):
            loss, acc = self.train_one_epoch()
            self.scheduler.step()
            # Step 7: let rank 0 alone print and save. Otherwise every line would appear once
            # per rank.
            if hvd.rank() == 0:
                logger.info("epoch %d loss %.6f acc %.3f", epoch, loss, acc)
                print(f"epoch {epoch} loss {loss:.6f}")

    def save(self, path):
        # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
        # enough.
        if hvd.rank() == 0:
            torch.save(self.model.state_dict(), path)


def main():
    torch.manual_seed(42)
    trainer = Trainer(Config())
    trainer.fit()
    trainer.save("qsgd_convert_trainer.pt")


if __name__ == "__main__":
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    # Step 2: pin the GPU. The ranks of a node each take their own.
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    main()
