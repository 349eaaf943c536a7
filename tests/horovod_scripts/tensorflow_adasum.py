"""Combine gradients by Adasum in a tape loop of TensorFlow 2.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_adasum.py
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

rng = np.random.default_rng(hvd.rank())
images = rng.standard_normal((256, 8, 8, 1)).astype("float32")
labels = images.reshape(256, 4, 16).sum(2).argmax(1)

model = tf.keras.Sequential(
    [tf.keras.layers.Flatten(), tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(4)]
)
loss_object = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(lr=0.01)
losses = []
average = tf.keras.metrics.Mean()
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(256).batch(32)
for batch, (x, y) in enumerate(dataset.take(40)):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(
        zip(gradients, model.trainable_variables, strict=True),
        experimental_aggregate_gradients=False,
    )
    if batch == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    average.update_state(loss)
    if batch % 10 == 9:
        losses.append(float(average.result()))
        average.reset_states()

sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
