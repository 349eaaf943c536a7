"""What the Keras workloads share, on TensorFlow: the start, a step's cost alone, image training."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import images
import keras
import numpy as np
import options
import tensorflow as tf
import training
from data import check_batch, prefetch, shards, shared
from training import Recipe

import qsgd_hpc.arrays as arrays
import qsgd_hpc.keras as hvd
from qsgd_hpc.scaling import Meter

say = partial(training.say, hvd)
report = partial(training.report, hvd)
conclude = partial(training.conclude, hvd)
run = partial(training.run, hvd)

# Steps without communication that tell what computing takes: the first ones build the graph.
UNTIMED_ALONE, TIMED_ALONE = 2, 5


def start(args: argparse.Namespace) -> None:
    """Join the job, take a GPU if there is one, and let all ranks draw the same weights."""
    options.apply_algorithm(args)
    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        gpu = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # TensorFlow does not read it
        tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    keras.utils.set_random_seed(args.seed)


def compile_model(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, args: argparse.Namespace | None
) -> None:
    """Make the model's step; with args, one that averages gradients in the bits they ask for."""
    if args is not None:
        compression = None  # then QSGD_BITS decides
        if args.bits:
            compression = (
                hvd.Compression.none if args.bits == 32 else hvd.Compression.qsgd(args.bits)
            )
        optimizer = hvd.DistributedOptimizer(
            optimizer, compression=compression, sparse_as_dense=True
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)


def distribute(
    model: keras.Model,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    args: argparse.Namespace,
    meter: Meter,
    batch: tuple[Any, ...],
) -> None:
    """Give every rank the first one's weights and make the step that averages gradients.

    Before that each rank takes a few steps without communication, all at the same time, and tells
    the meter what they took: a graph that waits for gradients blocks no thread of the program, so
    the waits themselves cannot be seen. The weights are as before afterwards.
    """
    weights = hvd.broadcast_object(model.get_weights(), root_rank=0)
    if hvd.size() > 1:
        compile_model(model, optimizer(), None)
        seconds = []
        for _ in range(UNTIMED_ALONE + TIMED_ALONE):
            begin = time.perf_counter()
            model.train_on_batch(*batch)
            seconds.append(time.perf_counter() - begin)
        meter.compute_only(seconds[UNTIMED_ALONE:])
    model.set_weights(weights)
    compile_model(model, optimizer(), args)


def weights_of(labels: Any, batch: int) -> Any:
    """Return weights that make the mean over ranks that of the batch, where shards differ."""
    if batch % hvd.size() == 0:
        return None
    return np.full(labels.shape, len(labels) * hvd.size() / batch, np.float32)


def accuracy(model: keras.Model, test: images.Images) -> float:
    """Return the share of images that the model labels rightly; each rank tests its share."""
    for i, variable in enumerate(model.non_trainable_variables):
        if "float" in variable.dtype:  # batch norm's statistics, which no gradient evens
            mean = arrays.allreduce(np.array(variable), name=f"buffer.{i}")
            variable.assign(mean)
    mine = np.arange(hvd.rank(), len(test), hvd.size())
    chosen = (mine[begin : begin + 250] for begin in range(0, len(mine), 250))
    right = sum(
        int((model.predict_on_batch(pixels).argmax(1) == labels).sum())
        for pixels, labels in prefetch(test.take(each) for each in chosen)
    )
    return float(sum(arrays.allgather_object(right)) / len(test))


def train_images(
    args: argparse.Namespace,
    recipe: Recipe,
    read: Callable[[], images.DataSet],
    build: Callable[[int, int], keras.Model],
) -> None:
    """Train a network that labels images, and record how.

    Args:
        args: the options of options.parser.
        recipe: how it learns.
        read: returns the data; called on rank 0.
        build: takes the number of classes and the images' side; returns a network that takes bytes,
            shape (n, side, side, channels).
    """
    start(args)
    rank, ranks = hvd.rank(), hvd.size()
    data = shared(read, hvd)
    batch = options.global_batch(args, ranks)
    steps_per_epoch = check_batch(batch, len(data.train), ranks)
    steps = options.total_steps(args, steps_per_epoch)
    epochs = math.ceil(steps / steps_per_epoch)
    test = data.test.first(steps * batch)  # a few steps are not worth a long test

    def batches(epoch: int) -> Any:
        chosen = shards(len(data.train), batch, rank=rank, ranks=ranks, seed=args.seed + epoch)
        coming = islice(chosen, steps - epoch * steps_per_epoch)
        return prefetch(data.train.take(each) for each in coming)

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(
            recipe.rate, recipe.momentum, nesterov=True, weight_decay=recipe.weight_decay
        )

    model = build(data.classes, data.train.size)
    meter = Meter(
        hvd, global_batch_size=batch, unit="images", dataset=data.name, test_samples=len(test)
    )
    pixels, labels = next(iter(batches(0)))
    distribute(model, optimizer, args, meter, (pixels, labels, weights_of(labels, batch)))
    say(
        f"{data.name}: {len(data.train)} images of {data.train.size} x {data.train.size} pixels, "
        f"{data.classes} classes; {parameters(model):,} parameters; batch {batch} on {ranks} "
        "rank(s)"
    )

    step = 0
    for epoch in range(epochs):
        losses = []
        for pixels, labels in meter.steps(batches(epoch)):
            model.optimizer.learning_rate = options.learning_rate(step, steps, recipe.peak(batch))
            losses.append(model.train_on_batch(pixels, labels, weights_of(labels, batch)))
            step += 1
        results = {"train_loss": float(np.mean(losses))}
        if not args.no_eval:
            results["test_accuracy"] = accuracy(model, test)
        report(meter.epoch(**results), epochs, "test_accuracy")
    conclude(meter.final(parameters=parameters(model)))


def parameters(model: keras.Model) -> int:
    """Return how many numbers the model learns."""
    return int(sum(math.prod(v.shape) for v in model.trainable_variables))


def to_floats(size: int, channels: int = 3) -> list[Any]:
    """Return layers that turn bytes into floats around zero."""
    return [
        keras.Input((size, size, channels), dtype="uint8"),
        keras.layers.Rescaling(1 / 127.5, offset=-1),
    ]
