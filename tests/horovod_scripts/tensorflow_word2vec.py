"""Learn embeddings by sparse gradients with TensorFlow 2.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_word2vec.py
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

WORDS, WIDTH = 200, 16
tf.random.set_seed(hvd.rank())
model = tf.Module()
model.embeddings = tf.Variable(tf.random.uniform([WORDS, WIDTH], -1.0, 1.0))
model.outputs = tf.Variable(tf.random.truncated_normal([WORDS, WIDTH], stddev=0.1))
model.biases = tf.Variable(tf.zeros([WORDS]))
opt = tf.optimizers.SGD(1.0 * hvd.size())
rng = np.random.default_rng(hvd.rank())


def train_step(centers, contexts, first_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            tf.nn.nce_loss(
                model.outputs,
                model.biases,
                contexts,
                tf.nn.embedding_lookup(model.embeddings, centers),
                num_sampled=16,
                num_classes=WORDS,
            )
        )
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert isinstance(gradients[1], tf.IndexedSlices)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.trainable_variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return float(hvd.allreduce(loss))


losses = []
for step in range(60):
    centers = rng.integers(0, WORDS, 64)
    losses.append(train_step(centers, ((centers + 1) % WORDS)[:, None], step == 0))

sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
