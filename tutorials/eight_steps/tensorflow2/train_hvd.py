"""Train a small network on scikit-learn's digits with a TensorFlow 2 loop, on many ranks.

    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc run -np 2 --bits 4 train_hvd.py     # gradients in 4 bits

This is train.py and eight steps, each marked where it happens.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import qsgd_hpc.tensorflow as hvd

EPOCHS, BATCH, RATE = 5, 50, 0.1

# Step 1: init.
hvd.init()
# Step 2: pin the GPU.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

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
# Step 4: scale the learning rate, with a warm-up over the first epoch.
warm_up = len(x_train) // (BATCH * hvd.size())
rate = tf.keras.optimizers.schedules.PolynomialDecay(RATE, warm_up, RATE * hvd.size())
optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    # Step 5: wrap the tape.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


# Step 6: broadcast the initial state, once the optimizer's variables exist.
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)

for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    # Step 3: shard the data, in equal parts.
    order = order[: len(order) // hvd.size() * hvd.size()]
    order = order[hvd.rank() :: hvd.size()]
    losses = []
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        losses.append(train_step(x_train[batch], y_train[batch]))
    # Step 8: average the metrics. Every rank tests on all test images, so `correct` is exact.
    train_loss = hvd.allreduce(tf.reduce_mean(losses), name="loss")
    correct = np.mean(np.argmax(model(x_test), 1) == y_test)
    # Step 7: let rank 0 alone print.
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
            f"test accuracy {correct:.2%}"
        )
# Step 7 again: and save.
if hvd.rank() == 0:
    model.save("digits.keras")
