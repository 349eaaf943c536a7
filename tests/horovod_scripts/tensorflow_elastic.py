"""Go on after a failed collective with TensorFlow 2.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_elastic.py
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

model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(4)])
loss_object = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(0.01 * hvd.size())
model(images[:1])
losses, failed = [], []


@tf.function
def train_one_batch(x, y):
    with tf.GradientTape() as tape:
        loss = loss_object(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)
    opt.apply_gradients(
        zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
    )
    return loss


@tf.function
def disagree(x):
    return hvd.allreduce(x, name="disagree")


@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 40):  # noqa: B020
        at = 32 * (state.batch % 8)
        losses.append(float(train_one_batch(images[at : at + 32], labels[at : at + 32])))
        if state.batch == 25 and not failed:
            failed.append(1)
            disagree(tf.ones([3 + hvd.rank()]))
        if state.batch % 10 == 0:
            state.commit()


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
train(state)
assert failed and len(losses) == 46

sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
