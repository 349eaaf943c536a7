"""Train the softmax regression in one process.

Run it: python train_digits.py
"""

import numpy as np
from digits import digits, loss_and_gradient


def main():
    x, y, x_test, y_test = digits()
    weights = np.zeros((65, 10), np.float32)
    for step in range(1501):
        loss, gradient = loss_and_gradient(weights, x, y, len(y))
        if step in (100, 500, 1500):
            accuracy = np.mean((x_test @ weights).argmax(axis=1) == y_test)
            print(f"step {step:4}  loss {loss:.4f}  test accuracy {accuracy:.1%}")
        weights -= 0.5 * gradient


if __name__ == "__main__":
    main()
