"""Train an LSTM language model whose embedding has sparse gradients, as made for Horovod.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod lstm.py
"""

import argparse
import math
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a text of words; default: a made-up language")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=16, help="words that gradients go back")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--sparse-as-dense", action="store_true")
parser.add_argument("--seed", type=int, default=1)


class Model(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, words)

    def forward(self, x, state):
        output, state = self.lstm(self.embedding(x), state)
        return self.decoder(output), state


def load(path):
    """Return a text as numbers of words, and how many words there are."""
    if path is None:  # each word is followed by one of two
        generator = torch.Generator().manual_seed(0)
        following = torch.randint(500, (500, 2), generator=generator)
        choice = torch.randint(2, (20_000,), generator=generator)
        words, word = [], 0
        for which in choice:
            word = int(following[word, which])
            words.append(word)
        return torch.tensor(words), 500
    words = path.read_text().split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] for word in words]), len(numbers)


def main(args):
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text, words = load(args.text)
    # Every rank reads a part of the text of its own.
    part = text[: len(text) // hvd.size() * hvd.size()].chunk(hvd.size())[hvd.rank()]
    columns = part[: len(part) // args.batch_size * args.batch_size].view(args.batch_size, -1)

    model = Model(words, args.width)
    dense = [(n, p) for n, p in model.named_parameters() if not n.startswith("embedding")]
    embedding = [(f"embedding.{n}", p) for n, p in model.embedding.named_parameters()]
    lr = args.lr * hvd.size()
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.Adam([p for _, p in dense], lr=lr), named_parameters=dense
        ),
        hvd.DistributedOptimizer(
            torch.optim.SparseAdam([p for _, p in embedding], lr=lr),
            named_parameters=embedding,
            sparse_as_dense=args.sparse_as_dense,
        ),
    ]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for optimizer in optimizers:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, args.epochs + 1):
        total, steps, state = 0.0, 0, None
        for begin in range(0, columns.shape[1] - args.bptt - 1, args.bptt):
            x = columns[:, begin : begin + args.bptt]
            y = columns[:, begin + 1 : begin + 1 + args.bptt]
            for optimizer in optimizers:
                optimizer.zero_grad()
            scores, state = model(x, state)
            state = tuple(each.detach() for each in state)
            loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
            loss.backward()
            # What is clipped is the average, so it has to be there first.
            optimizers[0].synchronize()
            nn.utils.clip_grad_norm_([p for _, p in dense], args.clip)
            with optimizers[0].skip_synchronize():
                optimizers[0].step()
            optimizers[1].step()
            total, steps = total + loss.item(), steps + 1
        loss = hvd.allreduce(torch.tensor(total / steps), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}  perplexity {math.exp(loss):.1f}")

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    same = all(torch.equal(flat, each) for each in hvd.allgather(flat[None], name="replicas"))
    if hvd.rank() == 0:
        print(f"replicas {'equal' if same else 'DIFFER'}")


if __name__ == "__main__":
    main(parser.parse_args())
