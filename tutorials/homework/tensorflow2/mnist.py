"""The homework's starting point: MNIST in one process, with a custom TensorFlow 2 loop.

Run: python mnist.py
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parent.parent))
import homework_data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--images", type=int, help="how many images to train on (default all)")
parser.add_argument("--checkpoint", help="where to save the weights, *.weights.h5")
args = parser.parse_args()

tf.keras.utils.set_random_seed(1)
name, *arrays = homework_data.load(args.images)
print(f"{name}: {len(arrays[0])} training images, {len(arrays[2])} for testing")
x_train, y_train, x_test, y_test = arrays
train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .shuffle(len(x_train), seed=1)
    .batch(args.batch_size)
)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(500)

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
optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)

train_loss = tf.keras.metrics.Mean()
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
test_loss = tf.keras.metrics.Mean()
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_fn(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_loss.update_state(loss, sample_weight=tf.shape(labels)[0])
    train_accuracy.update_state(labels, logits)


@tf.function
def test_step(images, labels):
    logits = model(images, training=False)
    test_loss.update_state(loss_fn(labels, logits), sample_weight=tf.shape(labels)[0])
    test_accuracy.update_state(labels, logits)


for epoch in range(args.epochs):
    for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
        metric.reset_state()
    for images, labels in train_ds:
        train_step(images, labels)
    for images, labels in test_ds:
        test_step(images, labels)
    print(
        f"epoch {epoch + 1}  loss {train_loss.result():.4f}  "
        f"accuracy {train_accuracy.result():.4f}  test loss {test_loss.result():.4f}  "
        f"test accuracy {test_accuracy.result():.4f}"
    )
    if args.checkpoint:
        model.save_weights(args.checkpoint)
