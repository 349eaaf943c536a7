"""tf.keras in functions, with callbacks and a test set."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

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
    optimizer = tf.keras.optimizers.SGD(learning_rate=lr, momentum=0.5)
    model.compile(
        optimizer=optimizer,
        loss="mse",
        metrics=["mae"],
    )
    return model


def main():
    tf.keras.utils.set_random_seed(1)
    x_train, y_train = load(800, 0)
    x_test, y_test = load(200, 1)
    model = build_model(LR)
    model.summary()
    callbacks = [
        tf.keras.callbacks.ModelCheckpoint("qsgd_convert_best.keras", save_best_only=True),
        tf.keras.callbacks.EarlyStopping(patience=3),
    ]
    callbacks.append(tf.keras.callbacks.CSVLogger("qsgd_convert_log.csv"))
    history = model.fit(
        x_train,
        y_train,
        batch_size=20,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=2,
    )
    for number, loss in enumerate(history.history["loss"], 1):
        print("epoch", number, "loss", f"{loss:.6f}")
    print("test", model.evaluate(x_test, y_test, verbose=0))


if __name__ == "__main__":
    main()
