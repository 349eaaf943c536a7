"""Train in a graph and a session of TensorFlow 1, as a script made for Horovod does.

Nothing in this file knows of qsgd-hpc. Run it with: qsgd-hpc run -np 2 --horovod tensorflow_v1.py
"""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--checkpoint-dir", default="checkpoints")
args = parser.parse_args()

tf.disable_v2_behavior()
hvd.init()
tf.set_random_seed(hvd.rank())

image = tf.placeholder(tf.float32, [None, 16], name="image")
label = tf.placeholder(tf.int64, [None], name="label")
hidden_weights = tf.get_variable("hidden/weights", [16, 32])
hidden_biases = tf.get_variable("hidden/biases", [32], initializer=tf.zeros_initializer())
logits_weights = tf.get_variable("logits/weights", [32, 4])
hidden = tf.nn.relu(tf.matmul(image, hidden_weights) + hidden_biases)
logits = tf.matmul(hidden, logits_weights)
loss = tf.losses.sparse_softmax_cross_entropy(label, logits)
right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), label), tf.float32))

global_step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.AdagradOptimizer(args.lr * hvd.size()))
train_op = optimizer.minimize(loss, global_step=global_step)
mean_right = hvd.allreduce(right, name="accuracy")

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=args.steps // hvd.size()),
]
if hvd.rank() == 0:
    tensors = {"step": global_step, "loss": loss}
    hooks.append(tf.train.LoggingTensorHook(tensors=tensors, every_n_iter=10))
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
checkpoint_dir = args.checkpoint_dir if hvd.rank() == 0 else None

rng = np.random.default_rng(hvd.rank())
accuracy, step = 0.0, 0
with tf.train.MonitoredTrainingSession(
    checkpoint_dir=checkpoint_dir, hooks=hooks, config=config
) as session:
    while not session.should_stop():
        images = rng.standard_normal((64, 16)).astype(np.float32)
        labels = images.reshape(64, 4, 4).sum(2).argmax(1)
        _, accuracy, step = session.run(
            [train_op, mean_right, global_step], {image: images, label: labels}
        )
print(f"rank {hvd.rank()} ends after step {step} with accuracy {accuracy:.3f}", flush=True)
