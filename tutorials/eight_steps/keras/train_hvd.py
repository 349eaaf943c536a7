"""Train a small network on scikit-learn's digits with Keras, on many ranks.

    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc run -np 2 --bits 4 train_hvd.py     # gradients in 4 bits

This is train.py and eight steps, each marked where it happens.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import qsgd_hpc.keras as hvd

EPOCHS, BATCH, RATE = 5, 50, 0.1

# Step 1: init.
hvd.init()
# Step 2: pin the GPU.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

keras.utils.set_random_seed(1)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
# Step 3: shard the data, in equal parts.
equal = len(x_train) // hvd.size() * hvd.size()
x_train = x_train[:equal][hvd.rank() :: hvd.size()]
y_train = y_train[:equal][hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
)
# Step 4: scale the learning rate; the warm-up is a callback below.
optimizer = keras.optimizers.SGD(RATE * hvd.size(), momentum=0.9)
# Step 5: wrap the optimizer.
optimizer = hvd.DistributedOptimizer(optimizer)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])

callbacks = []
# Step 6: broadcast the initial state.
callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
# Step 8: average the metrics.
callbacks.append(hvd.callbacks.MetricAverageCallback())
# Step 4 again: the warm-up.
callbacks.append(hvd.callbacks.LearningRateWarmupCallback(RATE * hvd.size(), warmup_epochs=1))
history = model.fit(
    x_train,
    y_train,
    batch_size=BATCH,
    epochs=EPOCHS,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=0,
).history

# Step 7: let rank 0 alone print and save.
if hvd.rank() == 0:
    for epoch in range(EPOCHS):
        train_loss, correct = history["loss"][epoch], history["val_accuracy"][epoch]
        print(f"epoch {epoch + 1}: loss {train_loss:.4f}, test accuracy {correct:.2%}")
    model.save("digits.keras")
