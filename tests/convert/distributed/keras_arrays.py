"""Keras on arrays: compile by name, fit with a validation split."""
import numpy as np
from sklearn.datasets import load_digits
import keras
from keras import layers
import qsgd_hpc.keras as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
elif keras.backend.backend() == "torch":
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
else:
    import os

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpu = gpus[hvd.local_rank() % len(gpus)] or str(hvd.local_rank())
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu

# Each rank draws its own dropout; the initial weights are those of rank 0.
keras.utils.set_random_seed(3 + hvd.rank())

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(64, activation="relu"),
    layers.Dropout(0.1),
    layers.Dense(10, activation="softmax"),
])
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger.
# Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

# Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks have
# the same number.
shard = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())
# Step 7: let rank 0 alone print and save. One progress bar is enough.
# Step 6: broadcast the initial state. The broadcast callback gives every rank rank 0's
# variables before the first batch.
# Step 8: average the metrics. The average callback replaces a rank's metrics by those of all
# ranks.
# Step 4: scale the learning rate. The warm-up callback raises the rate to that of all ranks
# over the first epoch.
history = model.fit(x[shard], y[shard], batch_size=32, epochs=5, validation_split=0.2, verbose="auto" if hvd.rank() == 0 else 0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.001 * hvd.size(), warmup_epochs=1),
])  # that's all
for epoch, loss in enumerate(history.history["loss"]):
    # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
    if hvd.rank() == 0:
        print(f"epoch {epoch} loss {loss:.6f}")
# Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is enough.
if hvd.rank() == 0:
    model.save("qsgd_convert_digits.keras")
