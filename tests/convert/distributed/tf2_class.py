"""A subclassed model, eager, with checkpoints; metrics added up by hand."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
import qsgd_hpc.tensorflow as hvd

EPOCHS, BATCH, LR = 3, 64, 0.002


class Digits(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.first = tf.keras.layers.Dense(64, activation="relu")
        self.last = tf.keras.layers.Dense(10)

    def call(self, x):
        return self.last(self.first(x))


def accuracy(model, x, y):
    return float(tf.reduce_mean(tf.cast(tf.argmax(model(x), 1) == y, tf.float32)))


def train(model, optimizer, dataset):
    criterion = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    broadcast_done = False
    for epoch in range(EPOCHS):
        total, seen = 0.0, 0
        for step, (images, labels) in enumerate(dataset):
            with tf.GradientTape() as tape:
                loss = criterion(labels, model(images))
            # Step 5: wrap the optimizer. gradient() returns the mean of all ranks' gradients.
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            # Step 6: broadcast the initial state. After the first step, when all variables
            # exist, every rank takes rank 0's values.
            if not broadcast_done:
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
                broadcast_done = True
            total += float(loss) * len(labels)
            seen += len(labels)
        # Step 8: average the metrics. Every rank has summed over its own shard; now sum over
        # all ranks.
        total = sum(hvd.allgather_object(total))
        seen = sum(hvd.allgather_object(seen))
        # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per
        # rank.
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {total / seen:.6f}")


def main():
    # Each rank draws its own dropout; the initial weights are those of rank 0.
    tf.keras.utils.set_random_seed(5 + hvd.rank())
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x_train, y_train = x[:1500], y[:1500]
    # Step 3: shard the data. A shard before shuffling and batching, of equal size on all ranks.
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shard(hvd.size(), hvd.rank()).take(len(x_train) // hvd.size())
    dataset = dataset.shuffle(1500, seed=2).batch(BATCH)
    model = Digits()
    # Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size()
    # times larger. The rate rises from one rank's to that of all ranks over the first epoch.
    optimizer = tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.PolynomialDecay(LR, len(dataset), LR * hvd.size()))
    train(model, optimizer, dataset)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
    # enough.
    if hvd.rank() == 0:
        checkpoint.save("qsgd_convert_ckpt/digits")
        print("accuracy", accuracy(model, x[1500:], y[1500:]))


if __name__ == "__main__":
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    # Step 2: pin the GPU. The ranks of a node each take their own.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    main()
