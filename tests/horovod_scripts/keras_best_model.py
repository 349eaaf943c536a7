"""Keep the best model and load it with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_best_model.py
"""

import copy

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

model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.legacy.Adam(learning_rate=0.01)),
    loss="categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(
    x,
    y,
    validation_split=0.25,
    batch_size=32,
    epochs=3,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BestModelCheckpoint(monitor="val_loss", verbose=1, filepath="best.keras"),
    ],
)
losses = history.history["loss"]
hvd.allgather_object("the file is written")
model = hvd.load_model("best.keras")
losses += model.fit(x, y, batch_size=32, epochs=1, verbose=0).history["loss"]
model = copy.deepcopy(model)
losses += model.fit(x, y, batch_size=32, epochs=1, verbose=0).history["loss"]

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
