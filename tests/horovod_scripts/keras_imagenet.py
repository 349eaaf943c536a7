"""Train a ResNet with regularisation, schedules and resuming with Keras.

It is made for Horovod, and knows of nothing else. Run it with:

    qsgd-hpc run -np 2 --horovod keras_imagenet.py
"""

import argparse
from pathlib import Path

import horovod.keras as hvd
import keras
import numpy as np
from tensorflow.keras import backend as K

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.h5")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
hvd.init()
rng = np.random.default_rng(hvd.rank())
y = rng.integers(0, 4, 64)
x = (rng.standard_normal((64, 32, 32, 3)) * 0.1 + y[:, None, None, None]).astype("float32")
y = keras.utils.to_categorical(y, 4)
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=try_epoch)).exists():
        resume_from_epoch = try_epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
initial_lr = 0.005 * hvd.size()
inputs = keras.Input((32, 32, 3))
block = entry = keras.layers.Conv2D(8, 3, strides=4, padding="same")(inputs)
for _ in range(2):
    block = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, padding="same")(block))
    block = keras.layers.ReLU()(keras.layers.add([block, entry]))
block = keras.layers.GlobalAveragePooling2D()(block)
model = keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(block))
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(
        args.checkpoint_format.format(epoch=resume_from_epoch), compression=hvd.Compression.none
    )
else:
    config = model.get_config()
    for layer, layer_config in zip(model.layers, config["layers"], strict=True):
        if hasattr(layer, "kernel_regularizer"):
            regularizer = keras.regularizers.l2(5e-5)
            layer_config["config"]["kernel_regularizer"] = {
                "class_name": regularizer.__class__.__name__,
                "config": regularizer.get_config(),
            }
        if type(layer) is keras.layers.BatchNormalization:
            layer_config["config"]["momentum"] = 0.9
            layer_config["config"]["epsilon"] = 1e-5
    model = keras.models.Model.from_config(config)
    opt = keras.optimizers.SGD(lr=initial_lr, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.none)
    model.compile(
        loss=keras.losses.categorical_crossentropy,
        optimizer=opt,
        metrics=["accuracy", "top_k_categorical_accuracy"],
    )
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=1),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1.0, start_epoch=1, end_epoch=2
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1e-1, start_epoch=2
    ),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
history = model.fit(
    x,
    y,
    batch_size=16,
    callbacks=callbacks,
    epochs=args.epochs,
    initial_epoch=resume_from_epoch,
    verbose=0,
    workers=4,
)
print(f"resumed after {resume_from_epoch}, rate {float(K.get_value(model.optimizer.lr)):g}")
losses = history.history["loss"]

# Batch normalisation averages over each rank's own batches.
sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert len({tuple(each) for each in hvd.allgather_object(sums)}) == 1
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, replicas equal", flush=True)
