"""Train a small network on scikit-learn's digits with Keras, in one process.

    python train.py

train_hvd.py is this script for many ranks: compare the two with `diff`.
"""

import keras
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE = 5, 50, 0.1

keras.utils.set_random_seed(1)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
)
optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])

callbacks = []
history = model.fit(
    x_train,
    y_train,
    batch_size=BATCH,
    epochs=EPOCHS,
    validation_data=(x_test, y_test),
    callbacks=callbacks,
    verbose=0,
).history

for epoch in range(EPOCHS):
    train_loss, correct = history["loss"][epoch], history["val_accuracy"][epoch]
    print(f"epoch {epoch + 1}: loss {train_loss:.4f}, test accuracy {correct:.2%}")
model.save("digits.keras")
