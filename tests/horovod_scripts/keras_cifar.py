"""Augment images, decay the rate and save weights with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_cifar.py
"""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras.preprocessing.image import ImageDataGenerator

keras = tf.keras
hvd.init()

rng = np.random.default_rng(hvd.rank())
x = rng.standard_normal((256, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(x.reshape(256, 4, 16).sum(2).argmax(1), 4)

model = keras.Sequential()
model.add(keras.layers.Conv2D(8, kernel_size=(3, 3), activation="relu", input_shape=(8, 8, 1)))
model.add(keras.layers.MaxPooling2D(pool_size=(2, 2)))
model.add(keras.layers.Dropout(0.1))
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(4, activation="softmax"))

opt = keras.optimizers.RMSprop(learning_rate=0.003 * hvd.size(), decay=1e-2)
model.compile(
    loss="categorical_crossentropy", optimizer=hvd.DistributedOptimizer(opt), metrics=["accuracy"]
)
images = ImageDataGenerator(width_shift_range=0.05, height_shift_range=0.05)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(
        keras.callbacks.ModelCheckpoint("weights.h5", save_weights_only=True, period=1)
    )
history = model.fit(
    images.flow(x, y, batch_size=32),
    steps_per_epoch=8,
    epochs=4,
    verbose=0,
    callbacks=callbacks,
    use_multiprocessing=False,
    workers=2,
)
losses = history.history["loss"]
hvd.allgather_object("the file is written")
before = model.get_weights()
model.load_weights("weights.h5")
assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
