"""Combine steps by Adasum, several passes each, in a session of TensorFlow 1.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod tensorflow_v1_adasum.py
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
hvd.init()
x = tf.placeholder(tf.float32, [None, 6])
weights = tf.get_variable("weights", [6, 1])
loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - tf.reduce_sum(x, 1, keepdims=True)))
step = tf.train.get_or_create_global_step()
opt = hvd.DistributedOptimizer(
    tf.train.MomentumOptimizer(0.05, 0.5), op=hvd.Adasum, backward_passes_per_step=2
)
train_op = opt.minimize(loss, global_step=step)
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=30)]
rng = np.random.default_rng(hvd.rank())
losses = []
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        batch = rng.standard_normal((16, 6))
        value, _, at, *ends = session.run([loss, train_op, step, weights], {x: batch})
        losses.append(value)
assert at == 30, at

sums = [float(np.abs(each).sum()) for each in ends]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
