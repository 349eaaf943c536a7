"""Average float16 gradients in two parts and in groups with TensorFlow 2.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_predivide.py
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
    [
        tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
        hvd.SyncBatchNormalization(fused=False),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4, activation="softmax"),
    ]
)
opt = tf.keras.optimizers.legacy.SGD(lr=0.05 * hvd.size(), momentum=0.9)
opt.lr = opt.lr * 2
hvd.broadcast_variables(model.variables, root_rank=0)
losses = []


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.losses.sparse_categorical_crossentropy(y, model(x, training=True)))
    tape = hvd.DistributedGradientTape(
        tape,
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=hvd.size(),
        num_groups=2,
    )
    opt.apply_gradients(
        zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
    )
    return hvd.allreduce(loss, name="loss")


for _ in range(8):
    for batch in range(0, 256, 64):
        loss = step(images[batch : batch + 64], labels[batch : batch + 64])
    losses.append(float(loss))

sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
