"""Find and read a text, in numpy arrays: ptb.train.txt and its like in DIR or DIR/ptb."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from data import DataError, absent
from numpy.typing import NDArray
from options import data_folder

SYNTHETIC, VOCABULARY = 100_000, 10_000  # words to train on, and how many different ones


@dataclass(frozen=True)
class Text:
    """Words as numbers below ``vocabulary``: to train on, to validate and to test with."""

    name: str
    vocabulary: int
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


def ptb(folder: Path | None) -> Text:
    """Read Penn Treebank's words, numbered in the order in which they appear."""
    for place in (folder, folder / "ptb") if folder else ():
        if (place / "ptb.train.txt").is_file():
            parts = {p: _words(place / f"ptb.{p}.txt") for p in ("train", "valid", "test")}
            numbers = {word: i for i, word in enumerate(dict.fromkeys(parts["train"]))}
            for part, text in parts.items():
                if unknown := sorted(set(text) - set(numbers))[:3]:
                    raise DataError(f"{place}: words of ptb.{part}.txt not in training: {unknown}")
            arrays = {p: np.array([numbers[w] for w in text]) for p, text in parts.items()}
            return Text("ptb", len(numbers), **arrays)
    raise absent("Penn Treebank", folder, "ptb.train.txt, ptb.valid.txt and ptb.test.txt")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Copy it beside ptb.train.txt.") from None


def synthetic() -> Text:
    """Make up words that are as unevenly frequent as real ones (Zipf); the same on every rank."""
    frequency = 1 / np.arange(1, VOCABULARY + 1)
    random = np.random.default_rng(0)
    words = random.choice(VOCABULARY, SYNTHETIC, p=frequency / frequency.sum())
    held_out = SYNTHETIC // 10
    return Text("synthetic", VOCABULARY, words, words[:held_out], words[-held_out:])


def perplexity(loss: float) -> float:
    """Return the perplexity of a word's mean loss; infinite where it is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def windows(
    words: NDArray[np.int64], rows: int, length: int, *, rank: int, ranks: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Cut a text into rows that are read side by side, and these into windows.

    Args:
        words: the text; rows: of all ranks together; length: words of a window.
    Returns:
        words and the words after them, shape (rows of this rank, length); the same row of the next
        window reads on where this one ends.
    """
    across = len(words) // rows
    steps = (across - 1) // length
    if rows < ranks or steps < 1:
        raise DataError(
            f"{len(words)} words are too few for {rows} rows of {length} words on {ranks} ranks: "
            f"choose a global batch between {ranks} and {len(words) // (length + 1)}"
        )
    mine = words[: rows * across].reshape(rows, across)[rank::ranks]
    cuts = range(0, steps * length, length)
    return [(mine[:, c : c + length], mine[:, c + 1 : c + 1 + length]) for c in cuts]


def from_options(args: argparse.Namespace) -> Text:
    """Return the text that the options ask for."""
    return synthetic() if args.synthetic else ptb(data_folder(args))
