"""Train a network of torchvision: AlexNet, VGG-16, VGG-19 or Inception v3.

    qsgd-hpc run -np 8 --bits 4 zoo.py --network vgg16 --data DIR
    qsgd-hpc run -np 2 zoo.py --network alexnet --synthetic --classes 10

Images are 224 pixels a side, Inception's 299, unless --image-size says otherwise. The networks come
without weights, so nothing is downloaded.
"""

from __future__ import annotations

import common
import images
import options
import torch
from data import DataError
from torch import nn

# torchvision's name and arguments. Batch norm in VGG, as it does not learn reliably from scratch
# without, would make it another network than the one whose speed is known; so it has none.
NETWORKS: dict[str, tuple[str, dict[str, bool]]] = {
    "alexnet": ("alexnet", {}),
    "vgg16": ("vgg16", {}),
    "vgg19": ("vgg19", {}),
    "inception3": ("inception_v3", {"init_weights": True}),
}
LEAST = {"alexnet": 63, "vgg16": 32, "vgg19": 32, "inception3": 299}  # pixels a side
RATE, INCEPTION_SIZE = 0.01, 299


def network(name: str, classes: int, size: int) -> nn.Module:
    """Build a network with fresh weights."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError: made for another torch
        raise DataError(
            f"{name} comes from torchvision, which cannot be imported ({error}): pip install "
            f"torchvision, in the release and build that belong to torch {torch.__version__}"
        ) from None
    if size < LEAST[name]:
        raise DataError(f"{name} needs images of {LEAST[name]} pixels: --image-size {LEAST[name]}")
    build, more = NETWORKS[name]
    model: nn.Module = torchvision.models.get_model(
        build, weights=None, num_classes=classes, **more
    )
    return model


def main() -> None:
    """Read the command line and train."""
    parser = options.for_images("Train a network of torchvision.", epochs=90, batch=32)
    parser.add_argument("--network", choices=tuple(NETWORKS), required=True)
    args = parser.parse_args()
    if args.network == "inception3":
        args.image_size = args.image_size or INCEPTION_SIZE
    recipe = common.Recipe(rate=RATE, reference=128, most=8, augment=True)
    common.train_images(
        args,
        recipe,
        lambda: images.from_options(args),
        lambda classes, size: network(args.network, classes, size),
    )


if __name__ == "__main__":
    common.run(main, "zoo")
