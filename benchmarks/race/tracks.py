"""The tracks of the race: a network, its text, and the number of the base's steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import entrants  # noqa: F401  (finds the modules of end_to_end_torch)
import torch
from tasks import WORDS_A_SEQUENCE, Objective, WordModel, cross_entropy
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "fsdp"))

from model import Text, Transformer

__all__ = ["TRACKS", "Track"]

EXAMINED = 64  # pieces of the validation text, of all ranks together
CONTEXT = 64  # characters
WORDS = 2000  # different ones; all others are <unk>


@dataclass(frozen=True)
class Track:
    """A training; with the same seed, all entrants have the same batches and initial weights."""

    task: Objective
    pieces: Callable[[int], tuple[Tensor, Tensor]]
    """Returns one rank's share of a batch for a seed."""
    exam: tuple[Tensor, Tensor]
    """This rank's share of the validation."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    """Steps after which the base's validation loss is the target."""

    def batch(self, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's share of a step's batch."""
        return self.pieces((seed * 10_000 + step) * 64 + rank)

    def examine(self, model: nn.Module) -> Tensor:
        """Return the validation loss of this rank's share."""
        model.eval()
        with torch.no_grad():
            loss = self.task.loss(model, self.exam)
        model.train()
        return loss


def shakespeare(folder: Path | None, *, rank: int, ranks: int, steps: int | None) -> Track:
    """Return a transformer of 0.4 million parameters on characters."""
    text = Text.read(folder / "shakespeare" / "input.txt" if folder else None)
    inputs, targets = text.examination(EXAMINED, CONTEXT)
    own = slice(rank, None, ranks)
    return Track(
        task=Objective(
            title="GPT, characters",
            build=lambda: Transformer(text.characters, 96, 3, 4, CONTEXT),
            loss=cross_entropy,
            clip=1.0,
        ),
        pieces=lambda seed: text.batch(12, CONTEXT, seed),
        exam=(inputs[own], targets.view(EXAMINED, -1)[own].flatten()),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        steps=steps or 400,
    )


def ptb(folder: Path | None, *, rank: int, ranks: int, steps: int | None) -> Track:
    """Return an LSTM of 1.1 million parameters on the most frequent words.

    With all words, a training of this length learns little more than how frequent each word is.
    """
    if folder is None:
        training = torch.randint(0, WORDS, (20_000,), generator=torch.Generator().manual_seed(1))
        validation = training[:5000]
    else:
        texts = [(folder / "ptb" / f"ptb.{part}.txt").read_text() for part in ("train", "valid")]
        words = [text.replace("\n", " <eos> ").split() for text in texts]
        numbers = {word: i for i, (word, _) in enumerate(Counter(words[0]).most_common(WORDS))}
        other = numbers["<unk>"]
        training, validation = (
            torch.tensor([numbers.get(word, other) for word in part]) for part in words
        )
    text = Text(training, validation, WORDS, "")
    inputs, targets = text.examination(EXAMINED, WORDS_A_SEQUENCE)
    own = slice(rank, None, ranks)
    return Track(
        task=Objective(
            title="LSTM, words",
            build=lambda: WordModel(WORDS, 200, layers=1, scale=0.1),
            loss=cross_entropy,
            clip=5.0,
        ),
        pieces=lambda seed: text.batch(8, WORDS_A_SEQUENCE, seed),
        exam=(inputs[own], targets.view(EXAMINED, -1)[own].flatten()),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        steps=steps or 400,
    )


TRACKS: dict[str, Callable[..., Track]] = {"shakespeare": shakespeare, "ptb": ptb}
