"""Train a small network on scikit-learn's digits with a TensorFlow 2 loop, in one process.

    python train.py

train_hvd.py is this script for many ranks: compare the two with `diff`.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE = 5, 50, 0.1

tf.keras.utils.set_random_seed(1)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

model = tf.keras.Sequential(
    [
        tf.keras.Input((64,)),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(RATE, momentum=0.9)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    losses = []
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        losses.append(train_step(x_train[batch], y_train[batch]))
    train_loss = tf.reduce_mean(losses)
    correct = np.mean(np.argmax(model(x_test), 1) == y_test)
    print(
        f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
        f"test accuracy {correct:.2%}"
    )
model.save("digits.keras")
