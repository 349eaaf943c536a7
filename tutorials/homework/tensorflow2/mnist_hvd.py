"""The homework solved: mnist.py on many ranks.

Run: qsgd-hpc run -np 2 mnist_hvd.py
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

import qsgd_hpc.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where rank 0 saves the weights, *.weights.h5")
parser.add_argument("--warm-up", type=float, default=1, help="epochs until the full learning rate")
parser.add_argument("--records", help="where rank 0 adds a line of JSON for each epoch")
args = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

tf.keras.utils.set_random_seed(1)
name, *arrays = homework_data.load(args.images)
if hvd.rank() == 0:
    print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = arrays
train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    # Before shuffle and batch, or the ranks would share images. Of equal size, because a rank with
    # one batch more would wait for the others' gradients for ever.
    .shard(hvd.size(), hvd.rank())
    .take(len(x_train) // hvd.size())
    .shuffle(len(x_train), seed=1)
    .batch(args.batch_size)
)
test_ds = (
    tf.data.Dataset.from_tensor_slices((x_test, y_test)).shard(hvd.size(), hvd.rank()).batch(500)
)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input(shape=(28, 28, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# A batch size() times larger takes steps size() times larger, reached over the first epochs.
warm_up_steps = max(1, round(args.warm_up * len(train_ds)))
learning_rate = tf.keras.optimizers.schedules.PolynomialDecay(
    args.lr if args.warm_up else args.lr * hvd.size(), warm_up_steps, args.lr * hvd.size()
)
optimizer = tf.keras.optimizers.SGD(learning_rate, momentum=0.9)

train_loss = tf.keras.metrics.Mean()
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
test_loss = tf.keras.metrics.Mean()
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_fn(labels, logits)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_loss.update_state(loss, sample_weight=tf.shape(labels)[0])
    train_accuracy.update_state(labels, logits)


@tf.function
def test_step(images, labels):
    logits = model(images, training=False)
    test_loss.update_state(loss_fn(labels, logits), sample_weight=tf.shape(labels)[0])
    test_accuracy.update_state(labels, logits)


optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)

for epoch in range(args.epochs):
    begin_s = time.perf_counter()
    for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
        metric.reset_state()
    for images, labels in train_ds:
        train_step(images, labels)
    for images, labels in test_ds:
        test_step(images, labels)
    # A metric holds a sum and a count. Summed over the ranks, both speak of all the images.
    for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
        for value in metric.variables:
            value.assign(hvd.allreduce(tf.convert_to_tensor(value), op=hvd.Sum))
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}  loss {train_loss.result():.4f}  "
            f"accuracy {train_accuracy.result():.4f}  test loss {test_loss.result():.4f}  "
            f"test accuracy {test_accuracy.result():.4f}"
        )
        if args.checkpoint:
            model.save_weights(args.checkpoint)
        if args.records:
            record = {
                "ranks": hvd.size(),
                "warm_up": args.warm_up,
                "epoch": epoch + 1,
                "train_accuracy": float(train_accuracy.result()),
                "test_accuracy": float(test_accuracy.result()),
                "seconds": time.perf_counter() - begin_s,
            }
            with Path(args.records).open("a") as lines:
                lines.write(json.dumps(record) + "\n")
