"""Train a word-level LSTM on Penn Treebank (Zaremba et al. 2014), with TensorFlow, in one process.

    python train_lm_tf.py --data DIR                  # small, 13 epochs

train_lm_tf_hvd.py is this script for many ranks: compare the two with `diff`.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import ptb
import tensorflow as tf
from configs import CONFIGS, LAYERS, Config
from numpy.typing import NDArray


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
        np.savez(file, epoch=epoch, **weights)
    partial.replace(path)


def restore(path: Path | None, model: WordModel, config: str) -> int | str:
    """Load the weights; return how many epochs they have behind them, or what is wrong."""
    if path is None or not path.exists():
        return 0
    try:
        with np.load(path) as saved:
            for i, variable in enumerate(model.variables):
                variable.assign(saved[f"weight{i}"])
            return int(saved["epoch"])
    except Exception as error:  # NumPy raises many kinds; each means the same to the user
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{path}: not a checkpoint of '{config}' ({reason}). Choose another file."


def train(args: Namespace) -> None:
    """Train, printing a line for each epoch."""
    tf.config.experimental.enable_op_determinism()  # what is resumed takes the same steps
    config = CONFIGS[args.config]
    text = ptb.load(args.data)
    shape = (config.batch_size, config.num_steps)
    train_windows, valid_windows, test_windows = (
        windows(ptb.columns(part, *shape), config, args.steps)
        for part in (text.train, text.valid, text.test)
    )
    model = WordModel(text.vocabulary, config, args.seed)
    begin = restore(args.checkpoint, model, args.config) if args.resume else 0
    if isinstance(begin, str):
        sys.exit(f"train_lm_tf: {begin}")

    @tf.function
    def step_on(window: tf.Tensor, hidden: tf.Tensor, rate: tf.Tensor, key: tf.Tensor):
        with tf.GradientTape() as tape:
            scores, hidden = model(window[:-1], hidden, key)
            loss = loss_of(scores, window[1:]) / config.batch_size
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
        return ptb.perplexity(loss, words)

    epochs = args.epochs or config.epochs
    parameters = sum(int(np.prod(v.shape)) for v in model.variables)
    print(
        f"{args.config}: {parameters:,} parameters; "
        f"{len(text.train):,} words, {text.vocabulary:,} different ones; {len(train_windows)} steps"
    )
    for epoch in range(begin, epochs):
        rate, hidden = tf.constant(config.learning_rate(epoch)), nothing
        start, loss_sum = time.perf_counter(), 0.0
        for step, window in enumerate(train_windows, start=epoch * len(train_windows)):
            key = tf.constant([args.seed * 1000, step], tf.int32)
            loss, hidden = step_on(window, hidden, rate, key)
            loss_sum += float(loss)
        words = len(train_windows) * config.batch_size * config.num_steps
        train_perplexity = ptb.perplexity(loss_sum * config.batch_size, words)
        seconds = time.perf_counter() - start
        valid = evaluate(valid_windows)
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
            save(args.checkpoint, model, epoch + 1)
    test = evaluate(test_windows)
    print(f"test perplexity {test:.2f}")
    ptb.append_record(args.records, test_perplexity=test, epochs=epochs)


def main() -> None:
    """Read the command line and train."""
    args = ptb.parser("Train an LSTM on Penn Treebank, with TensorFlow.").parse_args()
    if args.resume and not args.checkpoint:
        sys.exit("train_lm_tf: --resume needs --checkpoint FILE, the file to go on from")
    try:
        train(args)
    except ptb.DataError as error:
        sys.exit(f"train_lm_tf: {error}")


if __name__ == "__main__":
    main()
