"""Train ResNet-34 (He et al., CVPR 2016, table 1) with Keras on TensorFlow.

    qsgd-hpc run -np 8 --bits 4 resnet34.py --data DIR                     # DIR holds images
    qsgd-hpc run -np 2 resnet34.py --synthetic --width 16 --image-size 32  # fits a laptop

The network of ../torch/resnet34.py: 21.8 million parameters at 224 pixels and 1,000 classes, and
CIFAR's stem below 64 pixels.
"""

from __future__ import annotations

from typing import Any

import common
import images
import keras
import options
from keras import layers

RECIPE = common.Recipe(rate=0.1, reference=256, weight_decay=1e-4)
LAYERS = (3, 4, 6, 3)
SMALL = 64  # pixels a side, from which on the stem is ImageNet's


def convolution(x: Any, outputs: int, size: int, stride: int) -> Any:
    """Add a convolution and its batch norm; borders are padded evenly, as in the paper."""
    if size > 1:
        x = layers.ZeroPadding2D(size // 2)(x)
    x = layers.Conv2D(outputs, size, stride, use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def block(x: Any, outputs: int, stride: int) -> Any:
    """Add two 3 x 3 convolutions beside a short cut."""
    short_cut = x
    if stride > 1 or x.shape[-1] != outputs:
        short_cut = convolution(x, outputs, 1, stride)
    y = layers.ReLU()(convolution(x, outputs, 3, stride))
    return layers.ReLU()(layers.Add()([convolution(y, outputs, 3, 1), short_cut]))


def resnet34(width: int, classes: int, size: int) -> keras.Model:
    """Build the network for images of that many pixels a side."""
    start, *scale = common.to_floats(size)
    x = layers.RandomFlip("horizontal")(scale[0](start))
    if size >= SMALL:
        x = layers.ReLU()(convolution(x, width, 7, 2))
        x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    else:
        x = layers.ReLU()(convolution(x, width, 3, 1))
    for stage, blocks in enumerate(LAYERS):
        for number in range(blocks):
            x = block(x, width << stage, 2 if stage > 0 and number == 0 else 1)
    return keras.Model(start, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def main() -> None:
    """Read the command line and train."""
    parser = options.for_images("Train ResNet-34.", epochs=90, batch=32)
    parser.add_argument("--width", type=options.positive, default=64, help="of stage 1 (64)")
    args = parser.parse_args()
    common.train_images(
        args,
        RECIPE,
        lambda: images.from_options(args),
        lambda classes, size: resnet34(args.width, classes, size),
    )


if __name__ == "__main__":
    common.run(main, "resnet34")
