import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np
import tensorflow as tf
from tensorflow import keras
import qsgd_hpc.keras as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

# Each rank draws its own dropout; the initial weights are those of rank 0.
keras.utils.set_random_seed(11 + hvd.rank())
BATCH_SIZE = 25

rng = np.random.RandomState(0)
features = rng.rand(1000, 6).astype(np.float32)
labels = (features.sum(axis=1) > 3).astype(np.int32)

# Step 3: shard the data. A shard before shuffling and batching, of equal size on all ranks.
train_ds = (
    tf.data.Dataset.from_tensor_slices((features, labels))
    .shard(hvd.size(), hvd.rank())
    .take(len(features) // hvd.size())
    .shuffle(1000, seed=5)
    .batch(BATCH_SIZE)
    .prefetch(tf.data.AUTOTUNE)
)

inputs = keras.Input(shape=(6,))
h = keras.layers.Dense(32, activation="relu")(inputs)
outputs = keras.layers.Dense(2)(h)
model = keras.Model(inputs, outputs)

# logits, not probabilities
# Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger.
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per
        # rank.
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {logs['loss']:.6f}")


# Step 6: broadcast the initial state. The broadcast callback gives every rank rank 0's
# variables before the first batch.
# Step 8: average the metrics. The average callback replaces a rank's metrics by those of all
# ranks.
# Step 4: scale the learning rate. The warm-up callback raises the rate to that of all ranks
# over the first epoch.
model.fit(train_ds, epochs=5, verbose=0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.01 * hvd.size(), warmup_epochs=1),
    Report(),
])
