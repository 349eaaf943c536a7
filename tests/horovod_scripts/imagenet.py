"""Train on a tree of JPEG files, ImageNet's way, as a script made for Horovod does.

Warm-up of the learning rate, several batches per allreduce, clipped gradients, averaged metrics,
and checkpoints on rank 0 from which the next run goes on. Nothing in this file knows of qsgd-hpc.
Run it with: qsgd-hpc run -np 2 --horovod imagenet.py --train-dir D/train --val-dir D/test
"""

import argparse
import math
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from PIL import Image
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--train-dir", type=Path, required=True, help="one folder for each class")
parser.add_argument("--val-dir", type=Path, required=True)
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pt")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=5e-5)
parser.add_argument("--clip", type=float, default=5.0)


class ImageFolder(torch.utils.data.Dataset):
    """Images of ``root/CLASS/*.jpg``, flipped at random for training."""

    def __init__(self, root, train):
        self.classes = sorted(each.name for each in root.iterdir() if each.is_dir())
        self.train = train
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).glob("*.jpg"))
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as file:
            image = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
        image = (image.float() / 255 - 0.45) / 0.225
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, label


class Metric:
    """A running mean over batches and ranks."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def network(classes):
    layers = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def accuracy(output, target):
    return output.argmax(1).eq(target).float().mean()


class Training:
    def __init__(self, args):
        self.args = args
        self.train_loader, self.train_sampler = self.loader(args.train_dir, True)
        self.val_loader, _ = self.loader(args.val_dir, False)
        self.model = network(len(self.train_loader.dataset.classes))
        lr = args.base_lr * args.batches_per_allreduce * hvd.size()
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=lr, momentum=args.momentum, weight_decay=args.wd
        )
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            backward_passes_per_step=args.batches_per_allreduce,
        )
        self.first_epoch = self.resume()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def loader(self, folder, train):
        dataset = ImageFolder(folder, train)
        sampler = torch.utils.data.distributed.DistributedSampler(
            dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=train
        )
        size = self.args.batch_size * (self.args.batches_per_allreduce if train else 1)
        return torch.utils.data.DataLoader(dataset, batch_size=size, sampler=sampler), sampler

    def resume(self):
        """Load the newest checkpoint on rank 0; return the epoch to go on with, on all ranks."""
        done = 0
        for epoch in range(self.args.epochs, 0, -1):
            if Path(self.args.checkpoint_format.format(epoch=epoch)).exists():
                done = epoch
                break
        done = hvd.broadcast(torch.tensor(done), root_rank=0, name="resume_from_epoch").item()
        if done > 0 and hvd.rank() == 0:
            saved = torch.load(self.args.checkpoint_format.format(epoch=done))
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            print(f"resuming after epoch {done}")
        return done

    def save(self, epoch):
        if hvd.rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.args.checkpoint_format.format(epoch=epoch + 1))

    def adjust_learning_rate(self, epoch, batch):
        """From 1/size of the full rate to the full rate within the warm-up, then by a cosine."""
        args = self.args
        at = epoch + batch / len(self.train_loader)
        if at < args.warmup_epochs:
            factor = 1 / hvd.size() * (at * (hvd.size() - 1) / args.warmup_epochs + 1)
        else:
            left = (at - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
            factor = 0.5 * (1 + math.cos(math.pi * min(left, 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor

    def train(self, epoch):
        self.model.train()
        self.train_sampler.set_epoch(epoch)
        loss, right = Metric("train_loss"), Metric("train_accuracy")
        for batch, (data, target) in enumerate(self.train_loader):
            self.adjust_learning_rate(epoch, batch)
            self.optimizer.zero_grad()
            parts = max(1, math.ceil(len(data) / self.args.batch_size))
            for images, labels in zip(data.chunk(parts), target.chunk(parts), strict=True):
                output = self.model(images)
                part_loss = F.cross_entropy(output, labels)
                right.update(accuracy(output, labels))
                loss.update(part_loss)
                part_loss.div(parts).backward()
            self.optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        self.report("Train", epoch, loss, right)

    def validate(self, epoch):
        self.model.eval()
        loss, right = Metric("val_loss"), Metric("val_accuracy")
        with torch.no_grad():
            for data, target in self.val_loader:
                output = self.model(data)
                loss.update(F.cross_entropy(output, target))
                right.update(accuracy(output, target))
        self.report("Validate", epoch, loss, right)

    @staticmethod
    def report(what, epoch, loss, right):
        if hvd.rank() == 0:
            print(
                f"{what} epoch #{epoch + 1}: loss {loss.avg.item():.4f}, "
                f"accuracy {100 * right.avg.item():.2f}%"
            )


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    training = Training(parser.parse_args())
    for epoch in range(training.first_epoch, training.args.epochs):
        training.train(epoch)
        training.validate(epoch)
        training.save(epoch)
