"""MNIST as Keras wants it: images of shape (n, 28, 28, 1), float32, and labels 0 to 9.

The reading is that of the first lesson, ../mnist_torch/mnist_data.py. Nothing is downloaded.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_torch"))
import mnist_data


def load(args):
    """Return the data's name, training images, their labels, test images and theirs.

    Without --data-dir it is what QSGD_DATA names, or what the first lesson has downloaded; without
    these, scikit-learn's digits. --images limits the training images, and the test images to a
    sixth of that.
    """
    folder, images = mnist_data.data_dir(args.data_dir), args.images
    found = not args.digits and (args.data_dir or mnist_data.find(folder))
    try:
        data = mnist_data.load(folder if found else None)
    except mnist_data.DataError as error:
        sys.exit(f"mnist_images: {error}")
    train, test = slice(images), slice(max(10, images // 6) if images else None)
    return (
        data.name,
        data.train_images.reshape(-1, 28, 28, 1)[train],
        data.train_labels[train],
        data.test_images.reshape(-1, 28, 28, 1)[test],
        data.test_labels[test],
    )
