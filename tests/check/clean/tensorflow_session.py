"""Train in a graph and a session of TensorFlow 1, with all eight steps."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
hvd.init()

x = tf.placeholder(tf.float32, [None, 16])
y = tf.placeholder(tf.int64, [None])
logits = tf.matmul(x, tf.get_variable("weights", [16, 4]))
loss = tf.losses.sparse_softmax_cross_entropy(y, logits)
mean_loss = hvd.allreduce(loss, name="loss")

step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdagradOptimizer(0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer)
train_op = optimizer.minimize(loss, global_step=step)

hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(1000 // hvd.size())]
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
checkpoint_dir = "checkpoints" if hvd.rank() == 0 else None
random = np.random.default_rng(hvd.rank())

with tf.train.MonitoredTrainingSession(
    checkpoint_dir=checkpoint_dir, hooks=hooks, config=config
) as session:
    while not session.should_stop():
        images = random.standard_normal((64, 16))
        _, value = session.run([train_op, mean_loss], {x: images, y: images.argmax(1) % 4})
        if hvd.rank() == 0:
            print(f"loss {value:.4f}")
