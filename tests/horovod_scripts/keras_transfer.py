"""Train the head of a frozen network, then all of it, with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_transfer.py
"""

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()

rng = np.random.default_rng(hvd.rank())
x = rng.standard_normal((256, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(x.reshape(256, 4, 16).sum(2).argmax(1), 4)

base = keras.Sequential([keras.layers.Flatten(input_shape=(8, 8, 1)), keras.layers.Dense(16)])
model = keras.Sequential([base, keras.layers.ReLU(), keras.layers.Dense(4, activation="softmax")])
losses = []
for trainable in (False, True):
    base.trainable = trainable
    opt = keras.optimizers.Adam(lr=0.01 * hvd.size())
    model.compile(hvd.DistributedOptimizer(opt), "categorical_crossentropy")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
    ]
    history = model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=callbacks)
    losses += history.history["loss"]

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
