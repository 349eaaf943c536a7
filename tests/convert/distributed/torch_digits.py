"""Classify scikit-learn's digits with a small MLP.

python torch_digits.py
"""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
import qsgd_hpc.torch as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return self.fc2(x)  # no softmax: cross_entropy does it


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    total_loss = 0
    # Step 3: shard the data. A new order in each epoch, the same on every rank.
    if hvd.size() > 1:
        train_loader.sampler.set_epoch(epoch)
    # Step 7: let rank 0 alone print and save. One progress bar is enough.
    for batch_idx, (data, target) in enumerate(tqdm(train_loader, disable=hvd.rank() != 0)):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        if batch_idx % args.log_interval == 0:
            # Step 7: let rank 0 alone print and save. Otherwise every line would appear once
            # per rank.
            if hvd.rank() == 0:
                print('Train Epoch: {} [{}/{}]\tLoss: {:.6f}'.format(
                    epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()))
    # Step 8: average the metrics. Every rank has summed over its own shard; now sum over all
    # ranks.
    total_loss = sum(hvd.allgather_object(total_loss)) / hvd.size()
    return total_loss / len(train_loader)


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.cross_entropy(output, target, reduction='sum').item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()

    test_loss /= len(test_loader.dataset)
    if hvd.rank() == 0:
        print('\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n'.format(
            test_loss, correct, len(test_loader.dataset),
            100. * correct / len(test_loader.dataset)))


def main():
    parser = argparse.ArgumentParser(description='digits')
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--epochs', type=int, default=6)
    parser.add_argument('--lr', type=float, default=0.05, help='learning rate')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--log-interval', type=int, default=20)
    parser.add_argument('--save', default='')
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x / 16, y, test_size=0.2, random_state=0)
    train_set = TensorDataset(torch.tensor(x_train).float(), torch.tensor(y_train))
    test_set = TensorDataset(torch.tensor(x_test).float(), torch.tensor(y_test))
    # Step 3: shard the data. Each rank draws from its own part, of equal size on all ranks;
    # unchanged on one rank.
    train_sampler = None
    if hvd.size() > 1:
        train_sampler = torch.utils.data.distributed.DistributedSampler(
            train_set, num_replicas=hvd.size(), rank=hvd.rank()
        )
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=train_sampler is None, sampler=train_sampler)
    # Step 8: average the metrics. Every rank tests on all of this, so metrics need no
    # averaging.
    test_loader = DataLoader(test_set, batch_size=1000)

    model = Net().to(device)
    # Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size()
    # times larger.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Step 4: scale the learning rate. Large steps at the beginning would diverge, so the rate
    # rises over the first epoch.
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / hvd.size(), total_iters=len(train_loader)
    )
    optimizer.register_step_post_hook(lambda *_: warm_up.step())
    # Step 6: broadcast the initial state. Every rank starts with rank 0's values.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)

    for epoch in range(1, args.epochs + 1):
        train_loss = train(args, model, device, train_loader, optimizer, epoch)
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {train_loss:.6f}")
        test(model, device, test_loader)
        scheduler.step()

    if args.save:
        os.makedirs(os.path.dirname(args.save) or ".", exist_ok=True)
        # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
        # enough.
        if hvd.rank() == 0:
            torch.save(model.state_dict(), args.save)


if __name__ == '__main__':
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    # Step 2: pin the GPU. The ranks of a node each take their own.
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    main()
