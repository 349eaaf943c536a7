"""Keras on arrays: compile by name, fit with a validation split."""
import numpy as np
from sklearn.datasets import load_digits
import keras
from keras import layers

keras.utils.set_random_seed(3)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(64, activation="relu"),
    layers.Dropout(0.1),
    layers.Dense(10, activation="softmax"),
])
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit(x, y, batch_size=32, epochs=5, validation_split=0.2)  # that's all
for epoch, loss in enumerate(history.history["loss"]):
    print(f"epoch {epoch} loss {loss:.6f}")
model.save("qsgd_convert_digits.keras")
