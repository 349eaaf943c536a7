"""Train a linear model from a DataLoader, with all eight steps."""

import argparse

import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from torch import nn, optim

import qsgd_hpc.torch as hvd


def load(path):
    x = torch.load(path)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def evaluate(model, loader):
    model.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in loader:
            right += int((model(x).argmax(1) == y).sum())
            count += len(y)
    return average(right / count, "accuracy")


def main(args):
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load(args.data)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = nn.Linear(8, 2).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2%}")
            torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", default="model.pt")
    main(parser.parse_args())
