"""Train in a loop of its own with a gradient tape, with all eight steps."""

import horovod.tensorflow as hvd
import tensorflow as tf


def dataset_of(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shard(hvd.size(), hvd.rank())
    return dataset.shuffle(1000).batch(64, drop_remainder=True)


@tf.function
def training_step(model, optimizer, loss_of, images, labels, first):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


def main():
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    (x, y), _ = tf.keras.datasets.mnist.load_data()
    dataset = dataset_of(x / 255, y)
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
    optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    for epoch in range(3):
        loss = 0.0
        for batch, (images, labels) in enumerate(dataset):
            first = epoch == 0 and batch == 0
            loss = training_step(model, optimizer, loss_of, images, labels, first)
        mean_loss = hvd.allreduce(loss)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(mean_loss):.4f}")
            checkpoint.save("checkpoints/mnist")


if __name__ == "__main__":
    main()
