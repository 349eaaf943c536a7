"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014), with Keras on TensorFlow.

    qsgd-hpc run -np 2 --bits 4 ptb.py --size small --data DIR
    qsgd-hpc run -np 4 ptb.py --size large --synthetic --steps 40   # speed alone

The network of ../torch/ptb.py; ../zaremba.py has its sizes. A step takes a window of each row of
the text, and a row's state goes on into its next window. Validation reads as many rows as training.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import common
import keras
import numpy as np
import options
import words
import zaremba
from data import prefetch, shared
from keras import layers

import qsgd_hpc.arrays as arrays
import qsgd_hpc.keras as hvd
from qsgd_hpc.scaling import Meter


def network(vocabulary: int, size: zaremba.Size, rows: int) -> keras.Model:
    """Build embedding, two LSTM layers that keep their state, and the scores of each word."""
    uniform = keras.initializers.RandomUniform(-size.spread, size.spread)

    def lstm() -> list[layers.Layer]:
        layer = layers.LSTM(
            size.hidden,
            return_sequences=True,
            stateful=True,
            kernel_initializer=uniform.clone(),
            recurrent_initializer=uniform.clone(),
        )
        return [layer, layers.Dropout(size.dropout)]

    return keras.Sequential([
        keras.Input(batch_shape=(rows, size.window), dtype="int32"),
        layers.Embedding(vocabulary, size.hidden, uniform.clone()),
        layers.Dropout(size.dropout),
        *lstm(),
        *lstm(),
        layers.Dense(vocabulary, kernel_initializer=uniform.clone()),
    ])  # fmt: skip


def forget(model: keras.Model) -> None:
    """Let all rows begin anew."""
    for layer in model.layers:
        if isinstance(layer, layers.LSTM):
            layer.reset_state()


def perplexity(model: keras.Model, rows: list[tuple[Any, Any]]) -> float:
    """Return exp of the mean loss of a word; each rank reads its rows."""
    forget(model)
    losses = [model.test_on_batch(x, y) for x, y in prefetch(rows)]
    mine = float(np.sum(losses)) * rows[0][1].size, len(rows) * rows[0][1].size
    loss, count = np.sum(arrays.allgather_object(mine), axis=0)
    return words.perplexity(loss / count)


def train(args: argparse.Namespace) -> None:
    """Train, and record how."""
    size = zaremba.SIZES[args.size]
    common.start(args)
    rank, ranks = hvd.rank(), hvd.size()
    text = shared(lambda: words.from_options(args), hvd)
    batch = options.global_batch(args, ranks)
    here = {"length": size.window, "rank": rank, "ranks": ranks}
    rows = words.windows(text.train, batch, **here)
    steps = options.total_steps(args, len(rows))
    epochs = math.ceil(steps / len(rows))
    valid, test = (words.windows(t, batch, **here)[:steps] for t in (text.valid, text.test))

    def optimizer() -> keras.optimizers.Optimizer:
        # Keras averages the loss over a window's words, where the paper adds it up: the gradient is
        # `window` times smaller here, and so is the norm that it is clipped to.
        return keras.optimizers.SGD(float(size.window), global_clipnorm=size.clip / size.window)

    model = network(text.vocabulary, size, len(rows[0][0]))
    meter = Meter(
        hvd,
        global_batch_size=batch,
        unit="words",
        dataset=text.name,
        units_per_sample=size.window,
    )
    x, y = rows[0]
    common.distribute(model, optimizer, args, meter, (x, y, common.weights_of(y, batch)))
    common.say(
        f"{text.name}: {len(text.train):,} words, {text.vocabulary:,} different ones; "
        f"{common.parameters(model):,} parameters; {batch} rows on {ranks} rank(s)"
    )

    for epoch in range(epochs):
        forget(model)
        losses = []
        coming = prefetch(rows[: steps - epoch * len(rows)])
        for step, (x, y) in enumerate(meter.steps(coming)):
            rate = zaremba.rate(size, batch, epoch, step, len(rows))
            model.optimizer.learning_rate = rate * size.window
            losses.append(model.train_on_batch(x, y, common.weights_of(y, batch)))
        results = {"train_loss": float(np.mean(losses))}
        if not args.no_eval:
            results["perplexity"] = perplexity(model, valid)
        told = meter.epoch(**results)
        common.report(told, epochs, "perplexity")
    results = {"train_perplexity": words.perplexity(told["train_loss"])}
    if not args.no_eval:
        results["test_perplexity"] = perplexity(model, test)
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
