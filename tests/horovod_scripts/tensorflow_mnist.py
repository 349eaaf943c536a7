"""Train on MNIST in a loop of its own, as the homework of a course on Horovod has it.

Nothing in this file knows of qsgd-hpc. Run it with:
qsgd-hpc run -np 2 --horovod tensorflow_mnist.py --data-dir D
"""

import argparse
import gzip
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="folder of the idx files; default: made up")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=2048, help="how many images to train on")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--checkpoint-dir", default="checkpoints")
args = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.random.set_seed(hvd.rank())


def read_idx(path):
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def load(part, count):
    """Return so many images and labels; without a folder, bright squares in ten places."""
    if args.data_dir is not None:
        images = read_idx(args.data_dir / f"{part}-images-idx3-ubyte.gz")[:count]
        labels = read_idx(args.data_dir / f"{part}-labels-idx1-ubyte.gz")[:count]
        return images[..., None] / np.float32(255), labels.astype(np.int64)
    labels = np.arange(count, dtype=np.int64) % 10
    images = np.random.default_rng(count).random((count, 28, 28, 1), np.float32) / 4
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[8 * row : 8 * row + 6, 7 * column : 7 * column + 6] += 0.6
    return images, labels


def dataset_of(part, count):
    images, labels = load(part, count)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.shard(hvd.size(), hvd.rank()).shuffle(count).batch(args.batch_size)


class MNISTClassifier(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.conv1 = tf.keras.layers.Conv2D(32, 3, activation="relu")
        self.conv2 = tf.keras.layers.Conv2D(64, 3, activation="relu")
        self.pool = tf.keras.layers.MaxPooling2D()
        self.drop1 = tf.keras.layers.Dropout(0.25)
        self.flatten = tf.keras.layers.Flatten()
        self.dense1 = tf.keras.layers.Dense(128, activation="relu")
        self.drop2 = tf.keras.layers.Dropout(0.5)
        self.dense2 = tf.keras.layers.Dense(10)

    def call(self, x, training=False):
        x = self.drop1(self.pool(self.conv2(self.conv1(x))), training=training)
        return self.dense2(self.drop2(self.dense1(self.flatten(x)), training=training))


model = MNISTClassifier()
optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())
loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_function(labels, logits)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss, right_share(labels, logits)


@tf.function
def validation_step(images, labels):
    logits = model(images, training=False)
    return loss_function(labels, logits), right_share(labels, logits)


def right_share(labels, logits):
    return tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))


def metric_average(values, name):
    return float(hvd.allreduce(tf.reduce_mean(values), average=True, name=name))


train, test = dataset_of("train", args.images), dataset_of("t10k", args.images // 4)
begin = time.perf_counter()
for epoch in range(args.epochs):
    results = [
        training_step(images, labels, epoch == 0 and batch == 0)
        for batch, (images, labels) in enumerate(train)
    ]
    tested = [validation_step(images, labels) for images, labels in test]
    averages = [
        metric_average([float(pair[i]) for pair in pairs], f"{which}.{i}")
        for which, pairs in (("train", results), ("test", tested))
        for i in range(2)
    ]
    if hvd.rank() == 0:
        print(
            f"Epoch {epoch}: train loss {averages[0]:.4f}, train accuracy {averages[1]:.4f}, "
            f"test loss {averages[2]:.4f}, test accuracy {averages[3]:.4f}",
            flush=True,
        )
if hvd.rank() == 0:
    print(f"Saved {checkpoint.save(f'{args.checkpoint_dir}/mnist')}")
    print(f"Total training time: {time.perf_counter() - begin:.1f} s")
