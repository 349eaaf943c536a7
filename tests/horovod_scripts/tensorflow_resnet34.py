"""Train ResNet-34 over JPEG files in a loop of its own, as a script made for Horovod does.

XLA's automatic clustering is set by its variable, steps are profiled, losses averaged. Nothing in
this file knows of qsgd-hpc. Run it with:
qsgd-hpc run -np 2 --horovod tensorflow_resnet34.py --data-dir D/train
"""

import argparse
import os
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["TF_XLA_FLAGS"] = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"

import tensorflow as tf

# isort: split
import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, required=True, help="one folder for each class")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-steps", type=int, default=10)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=0.001)
parser.add_argument("--profile-dir", help="where to write a profile of the last steps")
args = parser.parse_args()

# HVD-1: initialise.
hvd.init()
print(f"I am rank {hvd.rank()} of {hvd.size()}", flush=True)

# HVD-2: one GPU for each rank.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
else:
    tf.config.threading.set_intra_op_parallelism_threads(1)


class ResidualBlock(tf.keras.layers.Layer):
    def __init__(self, filters, stride):
        super().__init__()
        self.conv1 = tf.keras.layers.Conv2D(filters, 3, stride, "same", use_bias=False)
        self.norm1 = tf.keras.layers.BatchNormalization()
        self.conv2 = tf.keras.layers.Conv2D(filters, 3, 1, "same", use_bias=False)
        self.norm2 = tf.keras.layers.BatchNormalization()
        self.shortcut = None
        if stride > 1:
            self.shortcut = tf.keras.layers.Conv2D(filters, 1, stride, use_bias=False)

    def call(self, x, training=False):
        y = tf.nn.relu(self.norm1(self.conv1(x), training=training))
        y = self.norm2(self.conv2(y), training=training)
        return tf.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet34(tf.keras.Model):
    def __init__(self, classes, width):
        super().__init__()
        self.first = tf.keras.layers.Conv2D(width, 3, 1, "same", use_bias=False)
        self.norm = tf.keras.layers.BatchNormalization()
        self.blocks = [
            ResidualBlock(width << stage, 2 if stage and block == 0 else 1)
            for stage, count in enumerate((3, 4, 6, 3))
            for block in range(count)
        ]
        self.pool = tf.keras.layers.GlobalAveragePooling2D()
        self.classifier = tf.keras.layers.Dense(classes)

    def call(self, x, training=False):
        x = tf.nn.relu(self.norm(self.first(x), training=training))
        for block in self.blocks:
            x = block(x, training=training)
        return self.classifier(self.pool(x))


def read_image(path, label):
    image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(tf.cast(image, tf.float32) / 255.0, (32, 32)), label


def get_dataset(folder):
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
    samples = [
        (str(path), label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*.jpg"))
    ]
    paths, labels = zip(*samples, strict=True)
    dataset = tf.data.Dataset.from_tensor_slices((list(paths), list(labels)))
    dataset = dataset.shuffle(len(samples), seed=1).shard(hvd.size(), hvd.rank()).repeat()
    dataset = dataset.map(read_image, num_parallel_calls=2).batch(args.batch_size)
    return dataset.prefetch(2), len(classes)


dataset, classes = get_dataset(args.data_dir)
network = ResNet34(classes, args.width)
network(tf.zeros((1, 32, 32, 3)))
# HVD-3: a larger learning rate for more ranks.
optimizer = tf.keras.optimizers.Adam(args.learning_rate * hvd.size())
optimizer.build(network.trainable_variables)
loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def training_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_function(labels, network(images, training=True))
    # HVD-4: average the gradients.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, network.trainable_variables)
    optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
    return loss


for step, (images, labels) in enumerate(dataset.take(args.num_steps)):
    begin = time.perf_counter()
    if step == args.num_steps - 2 and args.profile_dir and hvd.rank() == 0:
        tf.profiler.experimental.start(args.profile_dir)
    loss = training_step(images, labels)
    if step == 0:
        # HVD-5: begin with the variables of rank 0.
        hvd.broadcast_variables(network.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    # HVD-6: average the metric.
    mean = hvd.allreduce(loss, average=True)
    if hvd.rank() == 0:
        speed = hvd.size() * args.batch_size / (time.perf_counter() - begin)
        print(f"step {step}: loss {float(mean):.4f}, {speed:.1f} images/s", flush=True)
if args.profile_dir and hvd.rank() == 0:
    tf.profiler.experimental.stop()

total = tf.add_n([tf.reduce_sum(tf.abs(w)) for w in network.trainable_variables])
print(f"rank {hvd.rank()} ends with weights of {float(total)!r}", flush=True)
