"""Train with Horovod's elastic API: committed states and a sampler that goes on where it was.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod elastic.py
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--fail-in-epoch", type=int, help="lose an epoch's work once, on every rank")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
x = torch.randn(256, 8)
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(8, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01 * hvd.size()),
    named_parameters=model.named_parameters(),
)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        state.loss = 0.0
        for batch, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.loss += loss.item()
            state.sampler.record_batch(batch, args.batch_size)
            if batch % args.batches_per_commit == args.batches_per_commit - 1:
                state.commit()
            if state.epoch == args.fail_in_epoch and not failed:
                failed.append(batch)
                raise HorovodInternalError("made up, to be recovered from")
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch}: loss {state.loss / len(loader):.4f}")
        state.epoch += 1
        state.commit()


failed = []
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, loss=0.0)
state.register_reset_callbacks([lambda: print(f"rank {hvd.rank()} begins again")])
train(state)
