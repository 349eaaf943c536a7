"""A graph and a session, as in 2017."""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.set_random_seed(2)
np.random.seed(2)

images = np.random.randn(800, 16).astype(np.float32)
labels = images.reshape(800, 4, 4).sum(2).argmax(1)
batch_size = 20

x = tf.placeholder(tf.float32, [None, 16])
y = tf.placeholder(tf.int64, [None])
w1 = tf.get_variable("w1", [16, 32])
b1 = tf.get_variable("b1", [32], initializer=tf.zeros_initializer())
w2 = tf.get_variable("w2", [32, 4])
logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2)
loss = tf.losses.sparse_softmax_cross_entropy(y, logits)

optimizer = tf.train.MomentumOptimizer(0.05, momentum=0.9)
train_op = optimizer.minimize(loss)
saver = tf.train.Saver()

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for epoch in range(5):
        total = 0.0
        batches = len(images) // batch_size
        for start in range(0, len(images), batch_size):
            end = start + batch_size
            _, value = sess.run([train_op, loss],
                                feed_dict={x: images[start:end], y: labels[start:end]})
            total += float(value)
        print("epoch %d loss %.6f" % (epoch, total / batches))
    saver.save(sess, "qsgd_convert_tf1/model")
