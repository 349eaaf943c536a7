"""Train a network of keras.applications: ResNet-50, VGG-16, VGG-19 or Inception v3.

    qsgd-hpc run -np 8 --bits 4 zoo.py --network vgg16 --data DIR
    qsgd-hpc run -np 2 zoo.py --network resnet50 --synthetic --classes 10 --image-size 32

Images are 224 pixels a side, Inception's 299, unless --image-size says otherwise. The networks come
without weights, so nothing is downloaded. AlexNet is in no release of keras.applications.
"""

from __future__ import annotations

import common
import images
import keras
import options
from data import DataError
from keras import layers

NETWORKS = {
    "resnet50": "ResNet50",
    "vgg16": "VGG16",
    "vgg19": "VGG19",
    "inception3": "InceptionV3",
}
RECIPES = {
    "resnet50": common.Recipe(rate=0.1, reference=256, weight_decay=1e-4),
    "inception3": common.Recipe(rate=0.05, reference=256, weight_decay=1e-4),
}
PLAIN = common.Recipe(rate=0.01, reference=128, most=8)  # without batch norm
LEAST = {"inception3": 75}  # pixels a side; 32 for the others
INCEPTION_SIZE = 299


def network(name: str, classes: int, size: int) -> keras.Model:
    """Build a network with fresh weights."""
    least = LEAST.get(name, 32)
    if size < least:
        raise DataError(f"{name} needs images of {least} pixels: --image-size {least}")
    build = getattr(keras.applications, NETWORKS[name])
    body = build(
        weights=None, input_shape=(size, size, 3), classes=classes, classifier_activation=None
    )
    return keras.Sequential([*common.to_floats(size), layers.RandomFlip("horizontal"), body])


def main() -> None:
    """Read the command line and train."""
    parser = options.for_images("Train a network of keras.applications.", epochs=90, batch=32)
    parser.add_argument("--network", choices=tuple(NETWORKS), required=True)
    args = parser.parse_args()
    if args.network == "inception3":
        args.image_size = args.image_size or INCEPTION_SIZE
    common.train_images(
        args,
        RECIPES.get(args.network, PLAIN),
        lambda: images.from_options(args),
        lambda classes, size: network(args.network, classes, size),
    )


if __name__ == "__main__":
    common.run(main, "zoo")
