"""Go on from a commit with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_elastic.py
"""

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

keras = tf.keras
hvd.init()

rng = np.random.default_rng(hvd.rank())
x = rng.standard_normal((256, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(x.reshape(256, 4, 16).sum(2).argmax(1), 4)

model = keras.Sequential()
model.add(keras.layers.Conv2D(8, kernel_size=(3, 3), activation="relu", input_shape=(8, 8, 1)))
model.add(keras.layers.MaxPooling2D(pool_size=(2, 2)))
model.add(keras.layers.Dropout(0.1))
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(4, activation="softmax"))

opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
model.compile(optimizer=opt, loss="categorical_crossentropy")
losses, failed = [], []


class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        losses.append(logs["loss"])
        if epoch == 2 and not failed:
            failed.append(1)
            tf.function(lambda: hvd_tf.allreduce(tf.ones([3 + hvd.rank()]), name="unequal"))()


@hvd.elastic.run
def train(state):
    model.fit(
        x,
        y,
        batch_size=32,
        epochs=5,
        initial_epoch=state.epoch,
        verbose=0,
        callbacks=[
            Fail(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        ],
    )


state = hvd.elastic.KerasState(model, epoch=0)
train(state)
assert failed and len(losses) == 6, losses

sums = [float(np.abs(each).sum()) for each in model.get_weights()]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
