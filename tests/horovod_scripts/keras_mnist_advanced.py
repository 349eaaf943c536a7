"""Train with warm-up, plateau and a generator with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_mnist_advanced.py
"""

import horovod.keras as hvd
import keras
import numpy as np

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

opt = keras.optimizers.Adadelta(lr=1.0 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])


def batches(size):
    while True:
        at = rng.integers(0, 256 - size)
        yield x[at : at + size], y[at : at + size]


callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=1.0 * hvd.size(), warmup_epochs=2),
    keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]
history = model.fit_generator(
    batches(32),
    steps_per_epoch=8,
    callbacks=callbacks,
    epochs=4,
    verbose=0,
    workers=4,
    validation_data=batches(32),
    validation_steps=2,
)
score = hvd.allreduce(model.evaluate_generator(batches(32), 4, workers=4))
assert np.isfinite(score).all()
assert len(set(hvd.allgather_object(tuple(history.history["val_loss"])))) == 1
losses = history.history["loss"]

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
