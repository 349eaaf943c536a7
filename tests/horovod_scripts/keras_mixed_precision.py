"""Train in mixed precision, with gradients in float16, with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_mixed_precision.py
"""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

keras = tf.keras
hvd.init()
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(hvd.rank())
x = rng.standard_normal((256, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(x.reshape(256, 4, 16).sum(2).argmax(1), 4)

model = keras.Sequential(
    [keras.layers.Flatten(), keras.layers.Dense(16, "relu"), keras.layers.Dense(4, dtype="float32")]
)
opt = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.05 * hvd.size()), compression=hvd.Compression.fp16, num_groups=1
)
model.compile(optimizer=opt, loss=keras.losses.CategoricalCrossentropy(from_logits=True))
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256).batch(32)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
losses = model.fit(dataset, epochs=3, verbose=0, callbacks=callbacks).history["loss"]

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
