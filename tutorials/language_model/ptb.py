"""Find and read Penn Treebank's words, and what else the scripts of this lesson share.

It knows no framework and no ranks but two numbers, `rank` and `ranks`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from configs import CONFIGS
from numpy.typing import NDArray

__all__ = ["DataError", "Text", "append_record", "columns", "load", "parser", "perplexity"]

FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
REMEDY = (
    "They are in simple-examples.tgz of Mikolov's RNNLM toolkit, folder simple-examples/data "
    "(http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz). Give their folder with --data, "
    "or let QSGD_DATA name it or the folder above a folder 'ptb'."
)


class DataError(Exception):
    """The text is absent, damaged or too short; the message says what to do."""


@dataclass(frozen=True)
class Text:
    """Words as numbers below `vocabulary`: int64, one dimension each."""

    vocabulary: int
    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


def load(argument: str | None) -> Text:
    """Read the three files from the folder of the argument, or else of QSGD_DATA.

    Words are numbered in the order in which training brings them; a line ends in the word <eos>.
    """
    chosen = argument or os.environ.get("QSGD_DATA")
    if not chosen:
        raise DataError(f"no folder to read {', '.join(FILES)} from. {REMEDY}")
    folder = Path(chosen).expanduser()
    place = next((p for p in (folder, folder / "ptb") if (p / FILES[0]).is_file()), None)
    if place is None:
        raise DataError(f"{folder}: found no {', '.join(FILES)} there or in its 'ptb'. {REMEDY}")
    parts = [_words(place / name) for name in FILES]
    numbers = {word: i for i, word in enumerate(dict.fromkeys(parts[0]))}
    for name, words in zip(FILES, parts, strict=True):
        if unknown := sorted(set(words) - set(numbers))[:3]:
            raise DataError(f"{place / name}: training has no such words: {unknown}. {REMEDY}")
    return Text(len(numbers), *(np.array([numbers[w] for w in words]) for words in parts))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").replace("\n", " <eos> ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {REMEDY}") from None


def columns(
    words: NDArray[np.int64], batch_size: int, num_steps: int, rank: int = 0, ranks: int = 1
) -> NDArray[np.int64]:
    """Cut a text into `batch_size` parts of one length, and return those of a rank side by side.

    Returns:
        shape (words of a part, parts of this rank). Rows t to t + num_steps are a window, rows
        t + 1 to t + num_steps + 1 the words to be foretold.
    """
    length = len(words) // batch_size
    if length <= num_steps or batch_size < ranks:
        raise DataError(
            f"{len(words)} words in {batch_size} parts on {ranks} rank(s): each rank needs a part, "
            f"and each part {num_steps + 1} words. Take fewer ranks or a longer text."
        )
    parts = words[: batch_size * length].reshape(batch_size, length)
    return np.ascontiguousarray(parts[rank::ranks].T)


def perplexity(loss: float, words: float) -> float:
    """Return the perplexity that a summed loss is; infinite where it is too large for a float."""
    return math.exp(loss / words) if loss / words < 709 else math.inf


def append_record(path: Path | None, **fields: Any) -> None:
    """Add a line of JSON to a file; table.py reads it."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """Return the options that all scripts of the lesson have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--config", choices=tuple(CONFIGS), default="small")
    made.add_argument("--data", metavar="DIR", help="folder of ptb.*.txt (default $QSGD_DATA)")
    made.add_argument("--epochs", type=_positive, help="passes (default: the configuration's)")
    made.add_argument("--steps", type=_positive, help="stop each pass after so many windows")
    made.add_argument("--seed", type=int, default=1, help="of weights and dropout (default 1)")
    made.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after each epoch")
    made.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    made.add_argument("--records", type=Path, metavar="FILE", help="add a line of JSON per epoch")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)
