"""The homework solved in PyTorch: mnist.py on many ranks.

Run: qsgd-hpc run -np 2 mnist_hvd.py
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

import qsgd_hpc.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where rank 0 saves the weights, *.pt")
parser.add_argument("--warm-up", type=float, default=1, help="epochs until the full learning rate")
parser.add_argument("--records", help="where rank 0 adds a line of JSON for each epoch")
args = parser.parse_args()

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
name, *arrays = homework_data.load(args.images)
if hvd.rank() == 0:
    print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = (torch.tensor(array, device=device) for array in arrays)
# PyTorch's convolutions want the channel first.
x_train, x_test = x_train.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(800, 10),
).to(device)
# A batch size() times larger takes steps size() times larger, reached over the first epochs.
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
steps_per_epoch = -(-(len(x_train) // hvd.size()) // args.batch_size)
warm_up = torch.optim.lr_scheduler.LinearLR(
    optimizer,
    start_factor=1 / hvd.size() if args.warm_up else 1,
    total_iters=max(1, round(args.warm_up * steps_per_epoch)),
)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(args.epochs):
    begin_s = time.perf_counter()
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    # Equally many for each rank: one with a batch more would wait for the others' gradients.
    order = order[: len(order) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    train = torch.zeros(3)  # sums of loss and of right answers, and the number of images
    for batch in order.split(args.batch_size):
        optimizer.zero_grad()
        logits = model(x_train[batch])
        loss = F.cross_entropy(logits, y_train[batch])
        loss.backward()
        optimizer.step()
        warm_up.step()
        correct = (logits.argmax(1) == y_train[batch]).sum().item()
        train += torch.tensor([loss.item() * len(batch), correct, len(batch)])
    test = torch.zeros(3)
    with torch.no_grad():
        for batch in torch.arange(hvd.rank(), len(x_test), hvd.size()).split(500):
            logits = model(x_test[batch])
            loss = F.cross_entropy(logits, y_test[batch], reduction="sum")
            correct = (logits.argmax(1) == y_test[batch]).sum().item()
            test += torch.tensor([loss.item(), correct, len(batch)])
    # Sums and counts, summed over the ranks, speak of all the images; a mean of means would not.
    train = hvd.allreduce(train, op=hvd.Sum, name="train")
    test = hvd.allreduce(test, op=hvd.Sum, name="test")
    (train_loss, train_accuracy), (test_loss, test_accuracy) = (
        (total[:2] / total[2]).tolist() for total in (train, test)
    )
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}  loss {train_loss:.4f}  accuracy {train_accuracy:.4f}  "
            f"test loss {test_loss:.4f}  test accuracy {test_accuracy:.4f}"
        )
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)
        if args.records:
            record = {
                "ranks": hvd.size(),
                "warm_up": args.warm_up,
                "epoch": epoch + 1,
                "train_accuracy": train_accuracy,
                "test_accuracy": test_accuracy,
                "seconds": time.perf_counter() - begin_s,
            }
            with Path(args.records).open("a") as lines:
                lines.write(json.dumps(record) + "\n")
