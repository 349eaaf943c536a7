"""A subclassed model, eager, with checkpoints; metrics added up by hand."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

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
    for epoch in range(EPOCHS):
        total, seen = 0.0, 0
        for step, (images, labels) in enumerate(dataset):
            with tf.GradientTape() as tape:
                loss = criterion(labels, model(images))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            total += float(loss) * len(labels)
            seen += len(labels)
        print(f"epoch {epoch}: loss {total / seen:.6f}")


def main():
    tf.keras.utils.set_random_seed(5)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x_train, y_train = x[:1500], y[:1500]
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    dataset = dataset.shuffle(1500, seed=2).batch(BATCH)
    model = Digits()
    optimizer = tf.keras.optimizers.Adam(LR)
    train(model, optimizer, dataset)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save("qsgd_convert_ckpt/digits")
    print("accuracy", accuracy(model, x[1500:], y[1500:]))


if __name__ == "__main__":
    main()
