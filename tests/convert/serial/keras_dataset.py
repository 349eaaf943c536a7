import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(11)
BATCH_SIZE = 25

rng = np.random.RandomState(0)
features = rng.rand(1000, 6).astype(np.float32)
labels = (features.sum(axis=1) > 3).astype(np.int32)

train_ds = (
    tf.data.Dataset.from_tensor_slices((features, labels))
    .shuffle(1000, seed=5)
    .batch(BATCH_SIZE)
    .prefetch(tf.data.AUTOTUNE)
)

inputs = keras.Input(shape=(6,))
h = keras.layers.Dense(32, activation="relu")(inputs)
outputs = keras.layers.Dense(2)(h)
model = keras.Model(inputs, outputs)

# logits, not probabilities
model.compile(
    keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch + 1} loss {logs['loss']:.6f}")


model.fit(train_ds, epochs=5, verbose=0, callbacks=[Report()])
