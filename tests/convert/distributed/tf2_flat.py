"""A GradientTape loop with Keras metrics, from top to bottom."""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf
import qsgd_hpc.tensorflow as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

# Each rank draws its own dropout; the initial weights are those of rank 0.
tf.keras.utils.set_random_seed(hvd.rank())

rng = np.random.default_rng(0)
x_train = rng.normal(size=(960, 12)).astype("float32")
y_train = (x_train[:, 0] * x_train[:, 1] > 0).astype("int64")

model = tf.keras.Sequential([
    tf.keras.layers.Input(shape=(12,)),
    tf.keras.layers.Dense(48, activation="relu"),
    tf.keras.layers.Dense(2),
])
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Step 3: shard the data. A shard before shuffling and batching, of equal size on all ranks.
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shard(hvd.size(), hvd.rank()).take(len(x_train) // hvd.size()).shuffle(960, seed=1).batch(24)
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger. The rate rises from one rank's to that of all ranks over the first epoch.
optimizer = tf.keras.optimizers.SGD(learning_rate=tf.keras.optimizers.schedules.PolynomialDecay(0.1, len(train_ds), 0.1 * hvd.size()), momentum=0.9)

train_loss = tf.keras.metrics.Mean(name="loss")
train_acc = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits)
    # Step 5: wrap the optimizer. gradient() returns the mean of all ranks' gradients.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    train_loss(loss)
    train_acc.update_state(y, logits)


broadcast_done = False
for epoch in range(6):
    # start afresh
    train_loss.reset_state()
    train_acc.reset_state()
    for x, y in train_ds:
        train_step(x, y)
        # Step 6: broadcast the initial state. After the first step, when all variables exist,
        # every rank takes rank 0's values.
        if not broadcast_done:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
            broadcast_done = True
    # Step 8: average the metrics. The metrics cover this rank's shard; with the sums of all
    # ranks they cover all data.
    for metric in (train_loss, train_acc):
        for value in metric.variables:
            value.assign(hvd.allreduce(tf.convert_to_tensor(value), op=hvd.Sum))
    # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
    if hvd.rank() == 0:
        print(f"Epoch {epoch + 1}, loss {train_loss.result():.6f}, accuracy {train_acc.result():.3f}")
