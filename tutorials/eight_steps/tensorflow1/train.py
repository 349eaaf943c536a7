"""Train a small network on scikit-learn's digits in a TensorFlow 1 graph, in one process.

    python train.py

train_hvd.py is this script for many ranks: compare the two with `diff`.
"""

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE = 5, 50, 0.1

tf.disable_eager_execution()
tf.set_random_seed(1)
config = tf.ConfigProto()

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
optimizer = tf.train.MomentumOptimizer(RATE, momentum=0.9)
train = optimizer.minimize(loss, global_step=step)
saver = tf.train.Saver()

with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(x_train))
        losses = []
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            feed = {images: x_train[batch], labels: y_train[batch]}
            losses.append(session.run([train, loss], feed)[1])
        train_loss = np.mean(losses)
        correct = session.run(accuracy, {images: x_test, labels: y_test})
        print(
            f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
            f"test accuracy {correct:.2%}"
        )
    saver.save(session, "./digits")
