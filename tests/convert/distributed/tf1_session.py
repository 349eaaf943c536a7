"""A graph and a session, as in 2017."""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow.compat.v1 as tf
import qsgd_hpc.tensorflow as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
# Each session does so, by its config.

tf.disable_v2_behavior()
tf.set_random_seed(2)
np.random.seed(2)

images = np.random.randn(800, 16).astype(np.float32)
labels = images.reshape(800, 4, 4).sum(2).argmax(1)
# Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks have
# the same number.
shard = slice(hvd.rank(), len(images) // hvd.size() * hvd.size(), hvd.size())
images, labels = images[shard], labels[shard]
batch_size = 20

x = tf.placeholder(tf.float32, [None, 16])
y = tf.placeholder(tf.int64, [None])
w1 = tf.get_variable("w1", [16, 32])
b1 = tf.get_variable("b1", [32], initializer=tf.zeros_initializer())
w2 = tf.get_variable("w2", [32, 4])
logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2)
loss = tf.losses.sparse_softmax_cross_entropy(y, logits)

# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger.
# qsgd-hpc: TODO raise the learning rate to this value over a warm-up.
# Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.05 * hvd.size(), momentum=0.9))
train_op = optimizer.minimize(loss)
saver = tf.train.Saver()

# Step 2: pin the GPU. The ranks of a node each take their own.
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    # Step 6: broadcast the initial state. Every rank starts with rank 0's values.
    sess.run(hvd.broadcast_global_variables(0))
    for epoch in range(5):
        total = 0.0
        batches = len(images) // batch_size
        for start in range(0, len(images), batch_size):
            end = start + batch_size
            _, value = sess.run([train_op, loss],
                                feed_dict={x: images[start:end], y: labels[start:end]})
            total += float(value)
        # Step 8: average the metrics. Every rank has summed over its own shard; now sum over
        # all ranks.
        total = sum(hvd.allgather_object(total)) / hvd.size()
        # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per
        # rank.
        if hvd.rank() == 0:
            print("epoch %d loss %.6f" % (epoch, total / batches))
    # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
    # enough.
    if hvd.rank() == 0:
        saver.save(sess, "qsgd_convert_tf1/model")
