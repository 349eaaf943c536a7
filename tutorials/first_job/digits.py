"""scikit-learn's 1,797 digits of 8 x 8 pixels: they come with it, so no download is needed."""

import torch
from sklearn import datasets
from torch import Tensor

Images = tuple[Tensor, Tensor]


def load_digits(training: int = 1500) -> tuple[Images, Images]:
    """Return images, shape (n, 64), values 0..1, and labels: of the training and of the test."""
    x, y = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    return (images[:training], labels[:training]), (images[training:], labels[training:])
