"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014); ../zaremba.py has the sizes.

    qsgd-hpc run -np 2 --bits 4 ptb.py --size small --data DIR
    qsgd-hpc run -np 4 ptb.py --size large --synthetic --steps 40   # speed alone

A step takes a window of each row of the text, and a row's state goes on into its next window.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import common
import options
import torch
import torch.nn.functional as F
import words
import zaremba
from data import prefetch, shared
from torch import Tensor, nn

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import Meter

LAYERS = 2
Windows = list[tuple[Any, Any]]
State = tuple[Tensor, Tensor] | None


class WordModel(nn.Module):
    """Embedding, two LSTM layers and the scores of each word, with dropout between them."""

    def __init__(self, vocabulary: int, size: zaremba.Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.hidden)
        self.lstm = nn.LSTM(
            size.hidden, size.hidden, LAYERS, batch_first=True, dropout=size.dropout
        )
        self.dropout = nn.Dropout(size.dropout)
        self.output = nn.Linear(size.hidden, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -size.spread, size.spread)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map words, shape (n, t), to scores of the next words, shape (n * t, vocabulary)."""
        hidden, state = self.lstm(self.dropout(self.embedding(x)), state)
        return self.output(self.dropout(hidden).flatten(0, 1)), state


def perplexity(model: nn.Module, rows: Windows, device: torch.device) -> float:
    """Return exp of the mean loss of a word; each rank reads its rows."""
    model.eval()
    loss, count, state = 0.0, 0, None
    with torch.no_grad():
        for x, y in tensors(rows, device):
            scores, state = model(x, state)
            loss += F.cross_entropy(scores, y, reduction="sum").item()
            count += y.numel()
    loss, count = common.total(loss, count)
    return words.perplexity(loss / count)


def tensors(rows: Windows, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows and the words after them, read ahead by a thread."""
    for x, y in prefetch(rows):
        x, y = torch.tensor(x, device=device), torch.tensor(y, device=device)
        yield x, y.flatten()


def train(args: argparse.Namespace) -> None:
    """Train, and record how."""
    size = zaremba.SIZES[args.size]
    device = common.start(args)
    rank, ranks = hvd.rank(), hvd.size()
    text = shared(lambda: words.from_options(args), hvd)
    batch = options.global_batch(args, ranks)
    here = {"length": size.window, "rank": rank, "ranks": ranks}
    rows = words.windows(text.train, batch, **here)
    steps = options.total_steps(args, len(rows))
    epochs = math.ceil(steps / len(rows))
    # A few steps are not worth a long test.
    most = max(1, steps * batch // zaremba.REFERENCE_BATCH)
    at_once = max(zaremba.REFERENCE_BATCH, ranks)
    valid = words.windows(text.valid, at_once, **here)[:most]
    test = words.windows(text.test, at_once, **here)[:most]

    model = WordModel(text.vocabulary, size).to(device)
    optimizer = common.distribute(args, model, torch.optim.SGD(model.parameters(), lr=1.0))
    common.say(
        f"{text.name}: {len(text.train):,} words, {text.vocabulary:,} different ones; "
        f"{common.parameters(model):,} parameters; {batch} rows on {ranks} rank(s)"
    )

    meter = Meter(
        hvd,
        global_batch_size=batch,
        unit="words",
        dataset=text.name,
        units_per_sample=size.window,
    )
    for epoch in range(epochs):
        model.train()
        loss_sum, state = torch.zeros((), device=device), None
        coming = rows[: steps - epoch * len(rows)]
        for step, (x, y) in enumerate(meter.steps(tensors(coming, device))):
            common.set_rate(optimizer, zaremba.rate(size, batch, epoch, step, len(rows)))
            optimizer.zero_grad()
            scores, state = model(x, state)
            state = tuple(part.detach() for part in state)  # gradients end with the window
            loss = F.cross_entropy(scores, y, reduction="sum") / (batch / ranks)
            loss.backward()
            optimizer.synchronize()  # the norm is that of the averaged gradient
            nn.utils.clip_grad_norm_(model.parameters(), size.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            loss_sum += loss.detach()
            if device.type == "cuda":
                torch.cuda.synchronize()  # else a step would end before its work has
        results = {"train_loss": loss_sum.item() / (len(coming) * size.window)}
        if not args.no_eval:
            results["perplexity"] = perplexity(model, valid, device)
        told = meter.epoch(**results)
        common.report(told, epochs, "perplexity")
    results = {"train_perplexity": words.perplexity(told["train_loss"])}
    if not args.no_eval:
        results["test_perplexity"] = perplexity(model, test, device)
    common.conclude(meter.final(parameters=common.parameters(model), **results))


def main() -> None:
    """Read the command line and train."""
    batch = zaremba.REFERENCE_BATCH
    parser = options.parser("Train an LSTM on Penn Treebank.", epochs=None, batch=batch)
    parser.add_argument("--size", choices=tuple(zaremba.SIZES), default="small")
    args = parser.parse_args()
    args.epochs = args.epochs or zaremba.SIZES[args.size].epochs
    train(args)


if __name__ == "__main__":
    common.run(main, "ptb")
