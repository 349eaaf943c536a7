"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014), in one process.

    python train_lm.py --data DIR                     # small: 13 epochs, test perplexity 115
    python train_lm.py --data DIR --config medium     # 39 epochs; large: 55, for a GPU

train_lm_hvd.py is this script for many ranks: compare the two with `diff`.
"""

from __future__ import annotations

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


@torch.no_grad()
def evaluate(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the perplexity of a text."""
    model.eval()
    loss, words, hidden = 0.0, 0, None
    for x, y in pairs:
        scores, hidden = model(x, hidden)
        loss += F.cross_entropy(scores, y, reduction="sum").item()
        words += y.numel()
    return ptb.perplexity(loss, words)


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


def train(args: Namespace) -> None:
    """Train, printing a line for each epoch."""
    config = CONFIGS[args.config]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = ptb.load(args.data)
    parts = (text.train, text.valid, text.test)
    train_pairs, valid_pairs, test_pairs = (
        windows(
            torch.from_numpy(ptb.columns(part, config.batch_size, config.num_steps)).to(device),
            config, args.steps,
        )
        for part in parts
    )  # fmt: skip

    torch.manual_seed(args.seed)
    model = WordModel(text.vocabulary, config).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # keeps nothing, so nothing to save
    saved = restore(args.checkpoint, model, args.config) if args.resume else None
    if isinstance(saved, str):
        sys.exit(f"train_lm: {saved}")
    begin = saved["epoch"] if saved else 0
    epochs = args.epochs or config.epochs
    print(
        f"{args.config}: {sum(p.numel() for p in model.parameters()):,} parameters; "
        f"{len(text.train):,} words, {text.vocabulary:,} different ones; {len(train_pairs)} steps"
    )

    for epoch in range(begin, epochs):
        torch.manual_seed(args.seed + 1000 * (epoch + 1))  # a resumed epoch drops the same words
        model.train()
        optimizer.param_groups[0]["lr"] = config.learning_rate(epoch)
        start = time.perf_counter()
        loss_sum, hidden = torch.zeros((), dtype=torch.float64, device=device), None
        for x, y in train_pairs:
            optimizer.zero_grad()
            scores, hidden = model(x, hidden)
            hidden = tuple(h.detach() for h in hidden)  # the next window begins with its values
            loss = F.cross_entropy(scores, y, reduction="sum") / config.batch_size
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            loss_sum += loss.detach()
        words = len(train_pairs) * config.batch_size * config.num_steps
        train_perplexity = ptb.perplexity(loss_sum.item() * config.batch_size, words)
        seconds = time.perf_counter() - start
        valid = evaluate(model, valid_pairs)
        print(
            f"epoch {epoch + 1}/{epochs}  train perplexity {train_perplexity:.2f}  "
            f"valid perplexity {valid:.2f}  {words / seconds:.0f} words/s",
            flush=True,
        )
        ptb.append_record(
            args.records, epoch=epoch + 1, train_perplexity=train_perplexity,
            valid_perplexity=valid, words_per_s=words / seconds,
        )  # fmt: skip
        if args.checkpoint:
            save(args.checkpoint, {"model": model.state_dict(), "epoch": epoch + 1})
    test = evaluate(model, test_pairs)
    print(f"test perplexity {test:.2f}")
    ptb.append_record(args.records, test_perplexity=test, epochs=epochs)


def main() -> None:
    """Read the command line and train."""
    args = ptb.parser("Train an LSTM on Penn Treebank.").parse_args()
    if args.resume and not args.checkpoint:
        sys.exit("train_lm: --resume needs --checkpoint FILE, the file to go on from")
    try:
        train(args)
    except ptb.DataError as error:
        sys.exit(f"train_lm: {error}")


if __name__ == "__main__":
    main()
