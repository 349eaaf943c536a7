"""The homework solved in Keras: mnist.py on many ranks.

Run: qsgd-hpc run -np 2 mnist_hvd.py
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

import qsgd_hpc.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where rank 0 saves the model, *.keras")
parser.add_argument("--warm-up", type=float, default=1, help="epochs until the full learning rate")
parser.add_argument("--records", help="where rank 0 adds a line of JSON for each epoch")
args = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

keras.utils.set_random_seed(1)
name, *arrays = homework_data.load(args.images)
if hvd.rank() == 0:
    print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = arrays
# Equally many for each rank: one with a batch more would wait for the others' gradients.
equal = len(x_train) // hvd.size() * hvd.size()
x_train = x_train[:equal][hvd.rank() :: hvd.size()]
y_train = y_train[:equal][hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [
        keras.layers.Input(shape=(28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
# A batch size() times larger takes steps size() times larger.
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
model.compile(
    optimizer=hvd.DistributedOptimizer(optimizer),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


class Report(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.begin_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        print(
            f"epoch {epoch + 1}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}  "
            f"test loss {logs['val_loss']:.4f}  test accuracy {logs['val_accuracy']:.4f}"
        )
        if args.records:
            record = {
                "ranks": hvd.size(),
                "warm_up": args.warm_up,
                "epoch": epoch + 1,
                "train_accuracy": logs["accuracy"],
                "test_accuracy": logs["val_accuracy"],
                "seconds": time.perf_counter() - self.begin_s,
            }
            with Path(args.records).open("a") as lines:
                lines.write(json.dumps(record) + "\n")


# The average comes first, or the report would speak of rank 0's shard.
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
if args.warm_up:
    callbacks.append(
        hvd.callbacks.LearningRateWarmupCallback(args.lr * hvd.size(), warmup_epochs=args.warm_up)
    )
if hvd.rank() == 0:
    callbacks.append(Report())
    if args.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=0,
)
