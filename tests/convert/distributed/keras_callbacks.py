"""tf.keras in functions, with callbacks and a test set."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import qsgd_hpc.keras as hvd

LR = 0.05
EPOCHS = 4


def load(count, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 10)).astype("float32")
    y = (x[:, 0] - 2 * x[:, 1] + np.sin(x[:, 2])).astype("float32")
    return x, y


def build_model(lr):
    model = tf.keras.Sequential([
        tf.keras.layers.Input((10,)),
        tf.keras.layers.Dense(24, activation="tanh"),
        tf.keras.layers.Dense(1),
    ])
    # Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size()
    # times larger.
    optimizer = tf.keras.optimizers.SGD(learning_rate=lr * hvd.size(), momentum=0.5)
    # Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer),
        loss="mse",
        metrics=["mae"],
    )
    return model


def main():
    # Each rank draws its own dropout; the initial weights are those of rank 0.
    tf.keras.utils.set_random_seed(1 + hvd.rank())
    x_train, y_train = load(800, 0)
    x_test, y_test = load(200, 1)
    model = build_model(LR)
    if hvd.rank() == 0:
        model.summary()
    # Step 6: broadcast the initial state. The broadcast callback gives every rank rank 0's
    # variables before the first batch.
    # Step 8: average the metrics. The average callback replaces a rank's metrics by those of
    # all ranks.
    # Step 4: scale the learning rate. The warm-up callback raises the rate to that of all ranks
    # over the first epoch.
    # Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is
    # enough.
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(float(model.optimizer.learning_rate), warmup_epochs=1),
        *([tf.keras.callbacks.ModelCheckpoint("qsgd_convert_best.keras", save_best_only=True)] if hvd.rank() == 0 else []),
        tf.keras.callbacks.EarlyStopping(patience=3),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.CSVLogger("qsgd_convert_log.csv"))
    # Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks
    # have the same number.
    shard = slice(hvd.rank(), len(x_train) // hvd.size() * hvd.size(), hvd.size())
    # Step 7: let rank 0 alone print and save. One progress bar is enough.
    history = model.fit(
        x_train[shard],
        y_train[shard],
        batch_size=20,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    for number, loss in enumerate(history.history["loss"], 1):
        if hvd.rank() == 0:
            print("epoch", number, "loss", f"{loss:.6f}")
    # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
    if hvd.rank() == 0:
        print("test", model.evaluate(x_test, y_test, verbose=0))


if __name__ == "__main__":
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    # Step 2: pin the GPU. The ranks of a node each take their own.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    main()
