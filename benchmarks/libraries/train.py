#!/usr/bin/env python3
"""Train a network of 2.2 million parameters by a library, without settings for compression.

    qsgd-hpc run -np 2 --network 1gbit --bits 4 benchmarks/libraries/train.py --library lightning
    qsgd-hpc scale benchmarks/libraries/study.yaml -o results

The script is written like that of a user of the library. The study times its steps from outside,
with 32 bits and with 4, and compares with DDP and torch's bfloat16 hook (--bf16).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

SIZE = int(os.environ["WORLD_SIZE"])


class Net(nn.Module):
    """Three convolutions, and a layer of two million weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss in the form that Trainer requires."""
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Images(torch.utils.data.Dataset[Any]):
    """Random images, drawn once."""

    def __init__(self, count: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        self._x = torch.randn(min(count, 512), 3, 32, 32, generator=numbers)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self._x[i % len(self._x)], "labels": i % 10}


def by_hand(args: argparse.Namespace, each: int) -> None:
    """Train with DistributedDataParallel."""
    dist.init_process_group("gloo")
    images = Images(each * SIZE * args.steps)
    sampler = torch.utils.data.distributed.DistributedSampler(images)
    loader = torch.utils.data.DataLoader(images, batch_size=each, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(Net())
    if args.bf16:
        # Wrapped, because torch knows the hook by its name and accepts it on GPUs only.
        hook = default_hooks.bf16_compress_hook
        model.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in loader:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    dist.destroy_process_group()


def by_lightning(args: argparse.Namespace, each: int) -> None:
    """Train with Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
        num_nodes=SIZE // int(os.environ["LOCAL_WORLD_SIZE"]), max_steps=args.steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Images(each * SIZE * args.steps), batch_size=each)
    trainer.fit(Module(), loader)


def by_trainer(args: argparse.Namespace, each: int) -> None:
    """Train with the Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused", max_steps=args.steps, per_device_train_batch_size=each, use_cpu=True,
        ddp_backend="gloo", optim="sgd", learning_rate=0.01, save_strategy="no",
        report_to="none", disable_tqdm=True, max_grad_norm=0,
    )  # fmt: skip
    Trainer(Net(), arguments, train_dataset=Images(each * SIZE * args.steps)).train()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="Train a small network by a library.")
    parser.add_argument("--library", choices=("ddp", "lightning", "trainer"), default="ddp")
    parser.add_argument("--bf16", action="store_true", help="DDP with torch's bfloat16 hook.")
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    way = {"ddp": by_hand, "lightning": by_lightning, "trainer": by_trainer}[args.library]
    way(args, args.global_batch_size // SIZE)


if __name__ == "__main__":
    main()
