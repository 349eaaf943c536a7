"""The homework's starting point in Keras: MNIST in one process, with fit().

Run: python mnist.py
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where to save the model, *.keras")
args = parser.parse_args()

keras.utils.set_random_seed(1)
name, *arrays = homework_data.load(args.images)
print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = arrays

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
model.compile(
    optimizer=keras.optimizers.SGD(args.lr, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(
            f"epoch {epoch + 1}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}  "
            f"test loss {logs['val_loss']:.4f}  test accuracy {logs['val_accuracy']:.4f}"
        )


callbacks = [Report()]
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
