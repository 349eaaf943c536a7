"""Train by a train_step of one's own with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_custom_step.py
"""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

keras = tf.keras
hvd.init()

rng = np.random.default_rng(hvd.rank())
x = rng.standard_normal((256, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(x.reshape(256, 4, 16).sum(2).argmax(1), 4)


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(4)
        self.average = keras.metrics.Mean(name="loss")

    def call(self, inputs, training=False):
        return self.dense(self.flatten(inputs))

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.average.update_state(loss)
        return {"loss": self.average.result()}


model = Classifier()
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
losses = model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=callbacks).history["loss"]

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
