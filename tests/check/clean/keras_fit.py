"""Train with Keras's fit on TensorFlow, with all eight steps."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

with np.load("mnist.npz") as data:
    x_train, y_train = data["x_train"] / 255, data["y_train"]
    x_test, y_test = data["x_test"] / 255, data["y_test"]
x_train, y_train = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(learning_rate=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("mnist.keras"))
model.fit(
    x_train,
    y_train,
    epochs=8,
    callbacks=callbacks,
    verbose=1 if hvd.rank() == 0 else 0,
    validation_data=(x_test, y_test),
)
if hvd.rank() == 0:
    model.save("trained.keras")
