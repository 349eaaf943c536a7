"""Fit a line through five features by gradient descent. One process.

Run it: python train.py
"""

import numpy as np


def samples(count=96):
    """Return features and targets; the last feature is the constant 1."""
    rng = np.random.default_rng(7)
    x = np.hstack([rng.standard_normal((count, 4)), np.ones((count, 1))])
    y = x @ np.array([2.0, -1.0, 0.5, 3.0, 1.0]) + 0.1 * rng.standard_normal(count)
    return x, y


def main():
    x, y = samples()
    weights = np.zeros(x.shape[1])
    for step in range(41):
        residual = x @ weights - y
        gradient = 2 * x.T @ residual / len(y)
        loss = residual @ residual / len(y)
        if step % 10 == 0:
            print(f"step {step:2}  loss {loss:.6f}")
        weights -= 0.1 * gradient
    print("weights", np.round(weights, 4))


if __name__ == "__main__":
    main()
