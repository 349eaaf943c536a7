"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014), with TensorFlow, on many ranks.

    qsgd-hpc run -np 2 train_lm_tf_hvd.py --data DIR             # small, 13 epochs
    qsgd-hpc run -np 2 --bits 4 train_lm_tf_hvd.py --data DIR    # gradients in 4 bits

This is train_lm_tf.py with its 20 rows of text shared out among the ranks: rank r of n reads rows
r, r + n, r + 2 n, ... The batch is the same, so the learning rate is the same as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import ptb
import tensorflow as tf
from configs import CONFIGS, LAYERS, Config
from numpy.typing import NDArray

import qsgd_hpc.tensorflow as hvd


class WordModel(tf.Module):
    """An embedding, two LSTM layers and the scores of each word, with dropout between them."""

    def __init__(self, vocabulary: int, config: Config, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)

        def uniform(*shape: int) -> tf.Variable:
            scale = config.init_scale
            return tf.Variable(random.uniform(-scale, scale, shape).astype(np.float32))

        n = config.hidden
        self.config = config
        self.embedding = uniform(vocabulary, n)
        self.lstm = [(uniform(n, 4 * n), uniform(n, 4 * n), uniform(4 * n)) for _ in range(LAYERS)]
        self.output, self.bias = uniform(n, vocabulary), uniform(vocabulary)

    def __call__(
        self, words: tf.Tensor, hidden: tf.Tensor, key: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Map words, shape (steps, parts), to scores of the next ones, (steps * parts, words).

        Args:
            hidden: shape (layers, 2, parts, width): output and cell of each layer.
            key: two numbers that say what is dropped; None drops nothing.
        """

        def drop(x: tf.Tensor, place: int) -> tf.Tensor:
            if key is None or not self.config.dropout:
                return x
            return tf.nn.experimental.stateless_dropout(
                x, self.config.dropout, key + tf.constant([place, 0])
            )

        x, last = drop(tf.gather(self.embedding, words), 0), []
        for layer, (into, again, bias) in enumerate(self.lstm):
            h, cell = hidden[layer, 0], hidden[layer, 1]
            outputs = []
            for from_input in tf.unstack(tf.matmul(x, into) + bias, self.config.num_steps):
                take, forget, new, give = tf.split(from_input + tf.matmul(h, again), 4, axis=1)
                cell = tf.sigmoid(forget) * cell + tf.sigmoid(take) * tf.tanh(new)
                h = tf.sigmoid(give) * tf.tanh(cell)
                outputs.append(h)
            last.append(tf.stack([h, cell]))
            x = drop(tf.stack(outputs), layer + 1)
        flat = tf.reshape(x, (-1, self.config.hidden))
        return tf.matmul(flat, self.output) + self.bias, tf.stack(last)


def total(*values: float) -> list[float]:
    """Return each value summed over the ranks."""
    return hvd.allreduce(tf.constant(values, tf.float64), op=hvd.Sum).numpy().tolist()


def loss_of(scores: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the loss summed over words."""
    y = tf.reshape(y, (-1,))
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))


def windows(text: NDArray[np.int64], config: Config, most: int | None) -> list[tf.Tensor]:
    """Cut a text into windows, each with the word that follows it."""
    n = config.num_steps
    return [tf.constant(text[t : t + n + 1]) for t in range(0, len(text) - n, n)[:most]]


def save(path: Path, model: WordModel, epoch: int) -> None:
    """Write a checkpoint in one step: a job that is killed leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    weights = {f"weight{i}": v.numpy() for i, v in enumerate(model.variables)}
    with partial.open("wb") as file:
        np.savez(file, epoch=epoch, rounding=json.dumps(hvd.rounding_state()), **weights)
    partial.replace(path)


def restore(path: Path | None, model: WordModel, config: str) -> dict[str, Any] | str:
    """Load the weights; return what else the checkpoint holds, or what is wrong."""
    if path is None or not path.exists():
        return {"epoch": 0, "rounding": {}}
    try:
        with np.load(path) as saved:
            for i, variable in enumerate(model.variables):
                variable.assign(saved[f"weight{i}"])
            return {"epoch": int(saved["epoch"]), "rounding": json.loads(str(saved["rounding"]))}
    except Exception as error:  # NumPy raises many kinds; each means the same to the user
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{path}: not a checkpoint of '{config}' ({reason}). Choose another file."


def train(args: Namespace) -> None:
    """Train; rank 0 prints a line for each epoch."""
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    tf.config.experimental.enable_op_determinism()  # what is resumed takes the same steps
    config = CONFIGS[args.config]
    text = ptb.load(args.data)
    shape = (config.batch_size, config.num_steps, rank, ranks)
    train_windows, valid_windows, test_windows = (
        windows(ptb.columns(part, *shape), config, args.steps)
        for part in (text.train, text.valid, text.test)
    )
    model = WordModel(text.vocabulary, config, args.seed)
    # Rank 0 reads; the others get what it read.
    saved = restore(args.checkpoint if args.resume and rank == 0 else None, model, args.config)
    saved = hvd.broadcast_object(saved, root_rank=0)
    if isinstance(saved, str):
        sys.exit(f"train_lm_tf_hvd: {saved}" if rank == 0 else 1)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.load_rounding_state(saved["rounding"])

    @tf.function
    def step_on(window: tf.Tensor, hidden: tf.Tensor, rate: tf.Tensor, key: tf.Tensor):
        with tf.GradientTape() as tape:
            scores, hidden = model(window[:-1], hidden, key)
            # The mean over the ranks of a sum over some rows, divided by a rank's fair share of the
            # batch, is the sum over all rows divided by the batch.
            loss = loss_of(scores, window[1:]) / (config.batch_size / ranks)
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(g) for g in gradients]  # the embedding's has few rows
        gradients, _ = tf.clip_by_global_norm(gradients, config.max_grad_norm)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(rate * gradient)
        return loss, hidden

    @tf.function
    def test_on(window: tf.Tensor, hidden: tf.Tensor):
        scores, hidden = model(window[:-1], hidden)
        return loss_of(scores, window[1:]), hidden

    nothing = tf.zeros((LAYERS, 2, train_windows[0].shape[1], config.hidden))

    def evaluate(parts: list[tf.Tensor]) -> float:
        loss, words, hidden = 0.0, 0, nothing
        for window in parts:
            lost, hidden = test_on(window, hidden)
            loss, words = loss + float(lost), words + config.num_steps * window.shape[1]
        return ptb.perplexity(*total(loss, words))

    epochs = args.epochs or config.epochs
    parameters = sum(int(np.prod(v.shape)) for v in model.variables)
    if rank == 0:
        print(
            f"{args.config}: {parameters:,} parameters; "
            f"{len(text.train):,} words, {text.vocabulary:,} different ones; "
            f"{len(train_windows)} steps; {config.batch_size} rows on {ranks} rank(s)",
            flush=True,
        )
    for epoch in range(saved["epoch"], epochs):
        rate, hidden = tf.constant(config.learning_rate(epoch)), nothing
        start, loss_sum = time.perf_counter(), 0.0
        sent = hvd.communication_stats()["wire_bytes"]
        for step, window in enumerate(train_windows, start=epoch * len(train_windows)):
            key = tf.constant([args.seed * 1000 + rank * 10, step], tf.int32)
            loss, hidden = step_on(window, hidden, rate, key)
            loss_sum += float(loss)
        words = len(train_windows) * config.batch_size * config.num_steps
        loss, sent = total(loss_sum, hvd.communication_stats()["wire_bytes"] - sent)
        train_perplexity = ptb.perplexity(loss * config.batch_size / ranks, words)
        seconds = time.perf_counter() - start
        valid = evaluate(valid_windows)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{epochs}  train perplexity {train_perplexity:.2f}  "
                f"valid perplexity {valid:.2f}  {words / seconds:.0f} words/s",
                flush=True,
            )
            ptb.append_record(
                args.records, epoch=epoch + 1, train_perplexity=train_perplexity,
                valid_perplexity=valid, words_per_s=words / seconds,
                ranks=ranks, bits=int(os.environ.get("QSGD_BITS", "32")),
                wire_bytes_per_step=sent / ranks / len(train_windows),
            )  # fmt: skip
            if args.checkpoint:
                save(args.checkpoint, model, epoch + 1)
    test = evaluate(test_windows)
    if rank == 0:
        print(f"test perplexity {test:.2f}")
        ptb.append_record(args.records, test_perplexity=test, epochs=epochs)


def main() -> None:
    """Read the command line and train."""
    args = ptb.parser(
        "Train an LSTM on Penn Treebank, with TensorFlow, on many ranks."
    ).parse_args()
    if args.resume and not args.checkpoint:
        sys.exit("train_lm_tf_hvd: --resume needs --checkpoint FILE, the file to go on from")
    try:
        train(args)
    except (ptb.DataError, hvd.UsageError, hvd.NonFiniteGradientError) as error:
        sys.exit(f"train_lm_tf_hvd: {error}" if hvd.local_rank() == 0 else 1)


if __name__ == "__main__":
    main()
