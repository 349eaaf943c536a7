"""Train on scikit-learn's digits with Keras 3 and Horovod, then compare the ranks' weights.

horovodrun -np 2 python train_keras.py
"""

import horovod.keras as hvd
import keras
from sklearn.datasets import load_digits

hvd.init()
digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train = x[:1500][hvd.rank() :: hvd.size()], y[:1500][hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
model.fit(x_train, y_train, batch_size=50, epochs=5, callbacks=callbacks, verbose=0)

accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)[1]
weight = float(model.layers[0].kernel[0, 0])
print(f"rank {hvd.rank()}: first weight {weight:.6f}, test accuracy {accuracy:.2%}")
