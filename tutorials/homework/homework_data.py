"""MNIST as the homework's scripts want it: images of shape (n, 28, 28, 1), float32.

The reading is that of the first lesson, ../mnist_torch/mnist_data.py.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_torch"))
import mnist_data


def load(images=None, folder=None):
    """Return the data's name, training images, their labels, test images and theirs.

    `images` limits the training images, and the test images to a sixth of that. Without `folder`
    and QSGD_DATA, files downloaded before are taken; without these, scikit-learn's digits, and
    `mnist_data` says so.
    """
    where = mnist_data.data_dir(folder)
    data = mnist_data.load(where if mnist_data.prepare(where) else None)
    train, test = slice(images), slice(max(10, images // 6) if images else None)
    return (
        data.name,
        data.train_images.reshape(-1, 28, 28, 1)[train],
        data.train_labels[train],
        data.test_images.reshape(-1, 28, 28, 1)[test],
        data.test_labels[test],
    )
