"""MNIST with Keras: the learning rate times the ranks, and the epochs divided among them.

Run: qsgd-hpc run -np 2 python train_mnist_keras.py --data-dir MNIST
Expect: at least 98.5 % of the test images after 12 epochs, whatever the ranks.
"""

import argparse
import math

import keras
import mnist_images
from keras import layers

import qsgd_hpc.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", help="folder of MNIST's four files (default $QSGD_DATA)")
parser.add_argument("--digits", action="store_true", help="scikit-learn's instead of MNIST's")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=float, default=12.0, help="of one rank; shared by all")
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where rank 0 saves the model after each epoch")


def main(args):
    hvd.init()
    epochs = math.ceil(args.epochs / hvd.size())
    name, x_train, y_train, x_test, y_test = mnist_images.load(args)
    if hvd.rank() == 0:
        print(f"{name}: {len(x_train)} training images, {len(x_test)} for testing")
    y_train, y_test = (keras.utils.to_categorical(labels, 10) for labels in (y_train, y_test))

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
