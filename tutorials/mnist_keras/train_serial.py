"""MNIST with Keras, in one process.

Run: python train_serial.py --data-dir MNIST
Expect: at least 98.5 % of the test images after 12 epochs.
"""

import argparse

import keras
import mnist_images
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", help="folder of MNIST's four files (default $QSGD_DATA)")
parser.add_argument("--digits", action="store_true", help="scikit-learn's instead of MNIST's")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where the model is saved after each epoch")


def main(args):
    name, x_train, y_train, x_test, y_test = mnist_images.load(args)
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
    optimizer = keras.optimizers.Adadelta(1.0)
    model.compile(optimizer, loss="categorical_crossentropy", metrics=["accuracy"])

    callbacks = []
    if args.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
    model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        callbacks=callbacks,
        epochs=args.epochs,
        verbose=2,
        validation_data=(x_test, y_test),
    )
    score = model.evaluate(x_test, y_test, verbose=0)
    print("Test loss:", score[0])
    print("Test accuracy:", score[1])


if __name__ == "__main__":
    main(parser.parse_args())
