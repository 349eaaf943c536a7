"""Train a small network on scikit-learn's digits in a TensorFlow 1 graph, on many ranks.

    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc run -np 2 --bits 4 train_hvd.py     # gradients in 4 bits

This is train.py and eight steps, each marked where it happens.
"""

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import qsgd_hpc.tensorflow as hvd

EPOCHS, BATCH, RATE = 5, 50, 0.1

# Step 1: init.
hvd.init()
tf.disable_eager_execution()
tf.set_random_seed(1)
config = tf.ConfigProto()
# Step 2: pin the GPU.
config.gpu_options.visible_device_list = str(hvd.local_rank())

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

images = tf.placeholder(tf.float32, [None, 64])
labels = tf.placeholder(tf.int64, [None])
glorot = tf.glorot_uniform_initializer()
first = tf.get_variable("first", [64, 128], initializer=glorot)
first_bias = tf.get_variable("first_bias", [128], initializer=tf.zeros_initializer())
last = tf.get_variable("last", [128, 10], initializer=glorot)
last_bias = tf.get_variable("last_bias", [10], initializer=tf.zeros_initializer())
logits = tf.nn.relu(images @ first + first_bias) @ last + last_bias
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))

step = tf.train.get_or_create_global_step()
# Step 4: scale the learning rate, with a warm-up over the first epoch.
warm_up = len(x_train) // (BATCH * hvd.size())
rate = tf.train.polynomial_decay(RATE, step, warm_up, RATE * hvd.size())
optimizer = tf.train.MomentumOptimizer(rate, momentum=0.9)
# Step 5: wrap the optimizer.
optimizer = hvd.DistributedOptimizer(optimizer)
train = optimizer.minimize(loss, global_step=step)
# Step 8: average the metrics. Every rank tests on all test images, so accuracy needs nothing.
my_loss = tf.placeholder(tf.float32, [])
mean_loss = hvd.allreduce(my_loss, name="loss")
saver = tf.train.Saver()

with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    # Step 6: broadcast the initial state.
    session.run(hvd.broadcast_global_variables(0))
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(x_train))
        # Step 3: shard the data, in equal parts.
        order = order[: len(order) // hvd.size() * hvd.size()]
        order = order[hvd.rank() :: hvd.size()]
        losses = []
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            feed = {images: x_train[batch], labels: y_train[batch]}
            losses.append(session.run([train, loss], feed)[1])
        # Step 8 again: the mean of the ranks' means.
        train_loss = session.run(mean_loss, {my_loss: np.mean(losses)})
        correct = session.run(accuracy, {images: x_test, labels: y_test})
        # Step 7: let rank 0 alone print.
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
                f"test accuracy {correct:.2%}"
            )
    # Step 7 again: and save.
    if hvd.rank() == 0:
        saver.save(session, "./digits")
