"""Ways to average gradients over the ranks, each with a separate network."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

import qsgd_hpc.tensorflow as hvd

ALONE = "single process"
RATE = 0.01

Average = Callable[[tf.GradientTape, tf.Tensor, list[tf.Variable]], Any]


def network() -> list[tf.Variable]:
    """Return the weights of the usual MNIST network: two convolutions and two dense layers."""
    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (12 * 12 * 64, 128), (128, 10)]
    return [
        tf.Variable(tf.random.stateless_normal(shape, [1, i], stddev=0.05))
        for i, shape in enumerate(shapes)
    ]


def loss_of(weights: list[tf.Variable], images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the mean cross entropy of images, shape (n, 28, 28, 1)."""
    first, second, dense, output = weights
    x = tf.nn.relu(tf.nn.conv2d(images, first, 1, "VALID"))
    x = tf.nn.relu(tf.nn.conv2d(x, second, 1, "VALID"))
    x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), [-1, 12 * 12 * 64])
    scores = tf.nn.relu(x @ dense) @ output
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
    return tf.reduce_mean(losses)


@dataclass
class Contestant:
    """A network in training."""

    what: str
    step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step on this rank, one value per turn."""
    wire_bytes: float = 0.0
    """Bytes that the engine sends from this rank in a step."""


def _trained(what: str, average: Average) -> Contestant:
    weights = network()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, images, labels)
        for weight, gradient in zip(weights, average(tape, loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    return Contestant(what, step)


def _engine(bits: int) -> Average:
    compression = hvd.Compression.none if bits == 32 else hvd.Compression.qsgd(bits=bits)

    def average(tape: tf.GradientTape, loss: tf.Tensor, weights: list[tf.Variable]) -> Any:
        distributed = hvd.DistributedGradientTape(tape, compression=compression)
        return distributed.gradient(loss, weights)

    return average


def _strategy(strategy: tf.distribute.Strategy) -> Contestant:
    """Average by the strategy, and update like all others."""
    weights = network()

    def replica(images: tf.Tensor, labels: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, images, labels)
        gradients = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        return loss, context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = strategy.run(replica, args=(images, labels))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    return Contestant("MultiWorkerMirrored", step)


def start_strategy() -> tf.distribute.Strategy:
    """Start a MultiWorkerMirroredStrategy with the ranks as workers; before other operations."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [f"127.0.0.1:{each}" for each in hvd.allgather_object(port)]
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def assemble(strategy: tf.distribute.Strategy) -> list[Contestant]:
    """Build every contestant from the same weights."""

    def own(tape: tf.GradientTape, loss: tf.Tensor, weights: list[tf.Variable]) -> Any:
        return tape.gradient(loss, weights)

    return [
        _trained(ALONE, own),
        _trained("no exchange", own),
        _strategy(strategy),
        *(_trained(f"engine {name}", _engine(bits)) for name, bits in BITS.items()),
    ]


BITS = {"fp32": 32, "8 bit": 8, "4 bit": 4}
