"""MNIST with Keras: the learning rate times the ranks, and the epochs divided among them.

Run: qsgd-hpc run -np 2 python train_mnist_keras.py --data-dir MNIST
Expect: at least 98.5 % of the test images after 12 epochs, whatever the ranks.
"""

import argparse
import gzip
import math
from pathlib import Path

import keras
import numpy as np
from keras import layers

import qsgd_hpc.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="folder of MNIST's four .gz files")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=float, default=12.0, help="of one rank; shared by all")
parser.add_argument("--images", type=int, default=60000, help="how many images to train on")
parser.add_argument("--checkpoint", help="where rank 0 saves the model after each epoch")


def read_idx(path):
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def load(folder, part, count):
    """Return so many images and labels; without a folder, bright squares in ten places."""
    if folder is None:
        labels = np.arange(count) % 10
        images = np.random.default_rng(count).random((count, 28, 28), np.float32) / 4
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[8 * row : 8 * row + 7, 7 * column : 7 * column + 7] += 0.7
    else:
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:count].astype("float32") / 255
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:count]
    return images[..., np.newaxis], keras.utils.to_categorical(labels, 10)


def main(args):
    hvd.init()
    epochs = math.ceil(args.epochs / hvd.size())
    x_train, y_train = load(args.data_dir, "train", args.images)
    x_test, y_test = load(args.data_dir, "t10k", max(10, args.images // 6))

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * hvd.size()))
    model.compile(optimizer, loss="categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    if hvd.rank() == 0 and args.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
    model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        callbacks=callbacks,
        epochs=epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        validation_data=(x_test, y_test),
    )
    score = model.evaluate(x_test, y_test, verbose=0)
    if hvd.rank() == 0:
        print("Test loss:", score[0])
        print("Test accuracy:", score[1])


if __name__ == "__main__":
    main(parser.parse_args())
