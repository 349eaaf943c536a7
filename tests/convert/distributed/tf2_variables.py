# Linear regression with bare variables; batches are slices of numpy arrays.
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np
import tensorflow as tf
import qsgd_hpc.tensorflow as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")

rng = np.random.default_rng(4)
x = rng.standard_normal((640, 5)).astype(np.float32)
true = np.array([[1.0], [-2.0], [0.5], [3.0], [0.0]], np.float32)
y = x @ true + 0.1 * rng.standard_normal((640, 1)).astype(np.float32)
# Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks have
# the same number.
shard = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())
x, y = x[shard], y[shard]

w = tf.Variable(tf.zeros([5, 1]))
b = tf.Variable(0.0)
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger.
# qsgd-hpc: TODO raise the learning rate to this value over a warm-up.
opt = tf.keras.optimizers.SGD(0.02 * hvd.size())
batch_size = 16

broadcast_done = False
for epoch in range(5):
    losses = []
    for start in range(0, len(x), batch_size):
        xb = x[start:start + batch_size]
        yb = y[start:start + batch_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(xb, w) + b - yb) ** 2)
        # Step 5: wrap the optimizer. gradient() returns the mean of all ranks' gradients.
        tape = hvd.DistributedGradientTape(tape)
        gw, gb = tape.gradient(loss, [w, b])
        opt.apply_gradients([(gw, w), (gb, b)])
        # Step 6: broadcast the initial state. After the first step, when all variables exist,
        # every rank takes rank 0's values.
        if not broadcast_done:
            hvd.broadcast_variables([w, b], root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
            broadcast_done = True
        losses.append(loss.numpy())
    # Step 8: average the metrics. Every rank has summed over its own shard; now sum over all
    # ranks.
    losses = sum(hvd.allgather_object(losses), [])
    # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
    if hvd.rank() == 0:
        print("epoch", epoch, "loss", "%.6f" % np.mean(losses))
    if epoch == 4:
        # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
        # enough.
        if hvd.rank() == 0:
            np.save("qsgd_convert_w.npy", w.numpy())
