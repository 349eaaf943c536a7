"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014), on many ranks.

    qsgd-hpc run -np 2 train_lm_hvd.py --data DIR             # small, 13 epochs
    qsgd-hpc run -np 2 --bits 4 train_lm_hvd.py --data DIR    # gradients in 4 bits

This is train_lm.py with its 20 rows of text shared out among the ranks: rank r of n reads rows r,
r + n, r + 2 n, ... The batch is the same, so the learning rate is the same as well.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import ptb
import torch
import torch.nn.functional as F
from configs import CONFIGS, LAYERS, Config
from torch import Tensor, nn

import qsgd_hpc
import qsgd_hpc.torch as hvd

Hidden = tuple[Tensor, Tensor] | None


class WordModel(nn.Module):
    """An embedding, two LSTM layers and the scores of each word, with dropout between them."""

    def __init__(self, vocabulary: int, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.hidden)
        self.lstm = nn.LSTM(config.hidden, config.hidden, LAYERS, dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.hidden, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.init_scale, config.init_scale)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Map words, shape (steps, parts), to scores of the next ones, (steps * parts, words)."""
        out, hidden = self.lstm(self.dropout(self.embedding(words)), hidden)
        return self.output(self.dropout(out).flatten(0, 1)), hidden


def windows(text: Tensor, config: Config, most: int | None) -> list[tuple[Tensor, Tensor]]:
    """Cut a text into windows and the words that follow each of their words."""
    starts = range(0, len(text) - config.num_steps, config.num_steps)[:most]
    n = config.num_steps
    return [(text[t : t + n], text[t + 1 : t + 1 + n].flatten()) for t in starts]


def total(*values: float) -> list[float]:
    """Return each value summed over the ranks."""
    sums: list[float] = hvd.allreduce(
        torch.tensor(values, dtype=torch.float64), op=hvd.Sum
    ).tolist()
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the perplexity of a text, of which each rank reads its rows."""
    model.eval()
    loss, words, hidden = 0.0, 0, None
    for x, y in pairs:
        scores, hidden = model(x, hidden)
        loss += F.cross_entropy(scores, y, reduction="sum").item()
        words += y.numel()
    return ptb.perplexity(*total(loss, words))


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint in one step: a job that is killed leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    torch.save(state, partial)
    partial.replace(path)


def restore(path: Path | None, model: nn.Module, config: str) -> dict[str, Any] | str | None:
    """Load the weights and return the checkpoint; None: there is none; text: what is wrong."""
    if path is None or not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        model.load_state_dict(state["model"])
    except Exception as error:  # torch raises many kinds; each means the same to the user
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{path}: not a checkpoint of '{config}' ({reason}). Choose another file."
    return state


def progress(epoch: int, step: int, hidden: Hidden, loss_sum: Tensor) -> dict[str, Any]:
    """Return where the training stands; every rank calls it, as each has rows of its own."""
    mine = {
        "hidden": [h.cpu() for h in hidden] if hidden else None,
        "loss_sum": loss_sum.item(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    return {
        "epoch": epoch,
        "step": step,
        "ranks": hvd.allgather_object(mine),
        "rounding": hvd.rounding_state(),
    }


def train(args: Namespace) -> None:
    """Train; rank 0 prints a line for each epoch."""
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    config = CONFIGS[args.config]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    text = ptb.load(args.data)
    parts = (text.train, text.valid, text.test)
    shape = (config.batch_size, config.num_steps, rank, ranks)
    train_pairs, valid_pairs, test_pairs = (
        windows(torch.from_numpy(ptb.columns(part, *shape)).to(device), config, args.steps)
        for part in parts
    )

    torch.manual_seed(args.seed)
    model = WordModel(text.vocabulary, config).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # keeps nothing, so nothing to save
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    torch.manual_seed(args.seed + rank)  # equal weights, but each rank drops words of its own

    # Rank 0 reads; the others get what it read.
    saved = restore(args.checkpoint, model, args.config) if args.resume and rank == 0 else None
    if isinstance(saved, dict):
        del saved["model"]
        if len(saved["ranks"]) != ranks:
            saved = f"{args.checkpoint}: of {len(saved['ranks'])} rank(s). Take as many to go on."
    saved = hvd.broadcast_object(saved, root_rank=0)
    if isinstance(saved, str):
        sys.exit(f"train_lm_hvd: {saved}" if rank == 0 else 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    begin, step, hidden, loss_before = 0, 0, None, 0.0
    if saved:
        begin, step, mine = saved["epoch"], saved["step"], saved["ranks"][rank]
        hidden = tuple(h.to(device) for h in mine["hidden"]) if mine["hidden"] else None
        loss_before = mine["loss_sum"]
        torch.set_rng_state(mine["rng"])
        if mine["cuda_rng"] is not None:
            torch.cuda.set_rng_state(mine["cuda_rng"])
        hvd.load_rounding_state(saved["rounding"])

    epochs = args.epochs or config.epochs
    if rank == 0:
        print(
            f"{args.config}: {sum(p.numel() for p in model.parameters()):,} parameters; "
            f"{len(text.train):,} words, {text.vocabulary:,} different ones; "
            f"{len(train_pairs)} steps; {config.batch_size} rows on {ranks} rank(s)",
            flush=True,
        )
    for epoch in range(begin, epochs):
        model.train()
        optimizer.param_groups[0]["lr"] = config.learning_rate(epoch)
        start, first_step = time.perf_counter(), step
        sent = hvd.communication_stats()["wire_bytes"]
        loss_sum = torch.full((), loss_before, dtype=torch.float64, device=device)
        for step, (x, y) in enumerate(train_pairs[first_step:], start=first_step + 1):
            optimizer.zero_grad()
            scores, hidden = model(x, hidden)
            hidden = tuple(h.detach() for h in hidden)  # the next window begins with its values
            # The mean over the ranks of a sum over some rows, divided by a rank's fair share of the
            # batch, is the sum over all rows divided by the batch.
            loss = F.cross_entropy(scores, y, reduction="sum") / (config.batch_size / ranks)
            loss.backward()
            optimizer.synchronize()  # to clip the averaged gradient, not this rank's
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            loss_sum += loss.detach()
            may_stop = args.checkpoint and step % 10 == 0 and step < len(train_pairs)
            if may_stop and qsgd_hpc.should_stop():  # a job whose time runs out
                state = progress(epoch, step, hidden, loss_sum)
                if rank == 0:
                    save(args.checkpoint, {**state, "model": model.state_dict()})
                qsgd_hpc.exit_for_resubmit()
        steps = len(train_pairs) - first_step
        words = config.batch_size * config.num_steps
        loss, sent = total(loss_sum.item(), hvd.communication_stats()["wire_bytes"] - sent)
        train_perplexity = ptb.perplexity(
            loss * config.batch_size / ranks, len(train_pairs) * words
        )
        seconds = time.perf_counter() - start
        valid = evaluate(model, valid_pairs)
        hidden, step, loss_before = None, 0, 0.0
        state = progress(epoch + 1, step, hidden, torch.zeros(()))
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{epochs}  train perplexity {train_perplexity:.2f}  "
                f"valid perplexity {valid:.2f}  {steps * words / seconds:.0f} words/s",
                flush=True,
            )
            ptb.append_record(
                args.records, epoch=epoch + 1, train_perplexity=train_perplexity,
                valid_perplexity=valid, words_per_s=steps * words / seconds,
                ranks=ranks, bits=int(os.environ.get("QSGD_BITS", "32")),
                wire_bytes_per_step=sent / ranks / steps,
            )  # fmt: skip
            if args.checkpoint:
                save(args.checkpoint, {**state, "model": model.state_dict()})
    test = evaluate(model, test_pairs)
    if rank == 0:
        print(f"test perplexity {test:.2f}")
        ptb.append_record(args.records, test_perplexity=test, epochs=epochs)


def main() -> None:
    """Read the command line and train."""
    args = ptb.parser("Train an LSTM on Penn Treebank, on many ranks.").parse_args()
    if args.resume and not args.checkpoint:
        sys.exit("train_lm_hvd: --resume needs --checkpoint FILE, the file to go on from")
    try:
        train(args)
    except (ptb.DataError, hvd.UsageError, hvd.NonFiniteGradientError) as error:
        sys.exit(f"train_lm_hvd: {error}" if hvd.local_rank() == 0 else 1)


if __name__ == "__main__":
    main()
