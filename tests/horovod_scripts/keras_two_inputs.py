"""Train a model of two inputs and two outputs with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_two_inputs.py
"""

import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

hvd.init()
rng = np.random.default_rng(hvd.rank())
words = rng.integers(0, 30, (256, 5))
numbers = rng.standard_normal((256, 3)).astype("float32")
first = keras.Input((5,), name="words", dtype="int32")
second = keras.Input((3,), name="numbers")
embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(30, 8)(first))
merged = keras.layers.concatenate([embedded, second])
merged = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(merged))
outputs = {
    "kind": keras.layers.Dense(1, activation="sigmoid", name="kind")(merged),
    "size": keras.layers.Dense(1, name="size")(merged),
}
model = keras.Model(inputs=[first, second], outputs=outputs)
opt = hvd.DistributedOptimizer(
    keras.optimizers.RMSprop(lr=0.005, decay=1e-6), backward_passes_per_step=2
)
model.compile(
    optimizer=opt,
    loss={"kind": "binary_crossentropy", "size": "mse"},
    loss_weights={"kind": 1.0, "size": 0.5},
)
targets = {"kind": (words.mean(1) > 15).astype("float32")[:, None], "size": numbers.sum(1)[:, None]}
losses = model.fit(
    {"words": words, "numbers": numbers},
    targets,
    batch_size=32,
    epochs=4,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
).history["loss"]

# Batch normalisation averages over each rank's own batches.
sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
