"""Train a small convolutional network on MNIST, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod mnist.py
"""

import argparse
import gzip
from pathlib import Path

import horovod
import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="folder of the four idx files; default: made up")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--images", type=int, default=2048, help="how many images to train on")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def read_idx(path):
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy()


def load(folder, part, count):
    """Return so many images and labels; without a folder, bright squares in ten places."""
    if folder is None:
        labels = torch.arange(count) % 10
        images = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(count)) / 4
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[0, 8 * row : 8 * row + 7, 7 * column : 7 * column + 7] += 0.7
    else:
        images = torch.from_numpy(read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:count])
        images = images.float().div(255).unsqueeze(1)
        labels = torch.from_numpy(read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:count]).long()
    return torch.utils.data.TensorDataset((images - 0.1307) / 0.3081, labels)


def train_epoch(args, epoch, model, optimizer, sampler, loader):
    model.train()
    sampler.set_epoch(epoch)  # shuffles anew
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if index % args.log_interval == 0 and hvd.rank() == 0:
            done = index * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(sampler)}] Loss: {loss.item():.6f}")


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model, sampler, loader):
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(1).eq(target).float().sum().item()
    loss = metric_average(loss / len(sampler), "avg_loss")
    accuracy = metric_average(correct / len(sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%")


def main(args):
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    if hvd.rank() == 0:
        print(f"Horovod {horovod.__version__}, {hvd.size()} ranks")

    # Workers are started as processes of their own, since forking a rank that runs MPI is unsafe.
    kwargs = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    loaders = []
    for part, count in (("train", args.images), ("t10k", args.images // 4)):
        dataset = load(args.data_dir, part, count)
        sampler = torch.utils.data.distributed.DistributedSampler(
            dataset, num_replicas=hvd.size(), rank=hvd.rank()
        )
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=args.batch_size, sampler=sampler, **kwargs
        )
        loaders.append((sampler, loader))

    model = Net()
    # Adasum does not need a larger learning rate for more ranks.
    lr_scaler = 1 if args.use_adasum else hvd.size()
    if args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train_epoch(args, epoch, model, optimizer, *loaders[0])
        test(model, *loaders[1])


if __name__ == "__main__":
    main(parser.parse_args())
