"""A GradientTape loop with Keras metrics, from top to bottom."""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(0)

rng = np.random.default_rng(0)
x_train = rng.normal(size=(960, 12)).astype("float32")
y_train = (x_train[:, 0] * x_train[:, 1] > 0).astype("int64")

model = tf.keras.Sequential([
    tf.keras.layers.Input(shape=(12,)),
    tf.keras.layers.Dense(48, activation="relu"),
    tf.keras.layers.Dense(2),
])
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(960, seed=1).batch(24)
optimizer = tf.keras.optimizers.SGD(learning_rate=0.1, momentum=0.9)

train_loss = tf.keras.metrics.Mean(name="loss")
train_acc = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    train_loss(loss)
    train_acc.update_state(y, logits)


for epoch in range(6):
    # start afresh
    train_loss.reset_state()
    train_acc.reset_state()
    for x, y in train_ds:
        train_step(x, y)
    print(f"Epoch {epoch + 1}, loss {train_loss.result():.6f}, accuracy {train_acc.result():.3f}")
