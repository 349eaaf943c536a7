# Linear regression with bare variables; batches are slices of numpy arrays.
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(4)
x = rng.standard_normal((640, 5)).astype(np.float32)
true = np.array([[1.0], [-2.0], [0.5], [3.0], [0.0]], np.float32)
y = x @ true + 0.1 * rng.standard_normal((640, 1)).astype(np.float32)

w = tf.Variable(tf.zeros([5, 1]))
b = tf.Variable(0.0)
opt = tf.keras.optimizers.SGD(0.02)
batch_size = 16

for epoch in range(5):
    losses = []
    for start in range(0, len(x), batch_size):
        xb = x[start:start + batch_size]
        yb = y[start:start + batch_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(xb, w) + b - yb) ** 2)
        gw, gb = tape.gradient(loss, [w, b])
        opt.apply_gradients([(gw, w), (gb, b)])
        losses.append(loss.numpy())
    print("epoch", epoch, "loss", "%.6f" % np.mean(losses))
    if epoch == 4:
        np.save("qsgd_convert_w.npy", w.numpy())
