"""MNIST with gluon on several ranks, as Horovod documents it for MXNet."""

import argparse
import gzip
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="IDX files; default: made-up digits")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=16000, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()


def idx(name, header):
    with gzip.open(args.data_dir / f"{name}.gz") as file:
        return np.frombuffer(file.read()[header:], np.uint8)


def digits(part, count):
    """Return images, float32, shape (n, 1, 28, 28), and labels."""
    if args.data_dir is None:
        rng = np.random.default_rng(count)
        labels = rng.integers(0, 10, count)
        shapes = np.random.default_rng(0).random((10, 28, 28)) > 0.7
        images = shapes[labels] + 0.3 * rng.standard_normal((count, 28, 28))
    else:
        images = idx(f"{part}-images-idx3-ubyte", 16).reshape(-1, 28, 28)[:count] / 255.0
        labels = idx(f"{part}-labels-idx1-ubyte", 8)[:count]
    return images[:, None].astype(np.float32), labels.astype(np.float32)


hvd.init()
images, labels = digits("train", args.images)
mine = slice(hvd.rank(), None, hvd.size())  # every rank trains on images of its own
train = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[mine], labels[mine]), args.batch_size, last_batch="discard"
)

mx.random.seed(hvd.rank())  # so that equal weights come from the broadcast alone
net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Conv2D(16, kernel_size=5, activation="relu"),
    gluon.nn.MaxPool2D(pool_size=2, strides=2),
    gluon.nn.Conv2D(32, kernel_size=5, activation="relu"),
    gluon.nn.MaxPool2D(pool_size=2, strides=2),
    gluon.nn.Flatten(),
    gluon.nn.Dense(128, activation="relu"),
    gluon.nn.Dense(10),
)
net.initialize(mx.init.Xavier(), ctx=mx.cpu())
net.hybridize()
params = net.collect_params()
hvd.broadcast_parameters(params, root_rank=0)
optimizer = mx.optimizer.create("sgd", learning_rate=args.lr * hvd.size(), momentum=0.9)
trainer = hvd.DistributedTrainer(params, optimizer)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    for data, label in train:
        with autograd.record():
            loss = loss_of(net(data), label)
        loss.backward()
        trainer.step(args.batch_size)
    mean = hvd.allreduce(loss.mean(), name="loss", average=True).asscalar()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f}", flush=True)

images, labels = digits("t10k", 2000)
right = (net(nd.array(images)).argmax(axis=1).asnumpy() == labels).mean()
flat = nd.concat(*(p.data().reshape(-1) for p in params.values()), dim=0).asnumpy()
hashes = hvd.allgather_object(flat.tobytes())
print(f"rank {hvd.rank()}: accuracy {right:.4f}, equal weights {len(set(hashes)) == 1}", flush=True)
