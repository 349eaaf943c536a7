"""Train an embedding in a session of TensorFlow 1.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_v1_embedding.py
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
hvd.init()
tf.set_random_seed(hvd.rank())
words = tf.placeholder(tf.int32, [None])
targets = tf.placeholder(tf.float32, [None])
table = tf.get_variable("table", [50, 8])
weights = tf.get_variable("weights", [8, 1])
guess = tf.matmul(tf.nn.embedding_lookup(table, words), weights)[:, 0]
loss = tf.reduce_mean(tf.square(guess - targets))
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.02), sparse_as_dense=False)
pairs = opt.compute_gradients(loss)
assert isinstance(pairs[0][0], tf.IndexedSlices)
train_op = opt.apply_gradients(pairs, global_step=tf.train.get_or_create_global_step())
bcast = hvd.broadcast_global_variables(0)
rng = np.random.default_rng(hvd.rank())
losses = []
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(bcast)
    for _ in range(80):
        batch = rng.integers(0, 50, 32)
        losses.append(session.run([loss, train_op], {words: batch, targets: batch / 50})[0])
    ends = session.run([table, weights])

sums = [float(np.abs(each).sum()) for each in ends]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
