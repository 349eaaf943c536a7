"""Average many quantisations of one gradient: bias.png.

Run it: python see_bias.py
"""

import matplotlib
import numpy as np
from digits import digits, loss_and_gradient
from qsgd import dequantise, quantise, variance

matplotlib.use("agg")
import matplotlib.pyplot as plt

DRAWS = 2 ** np.arange(11)


def errors_of_means(x, bits, rounding):
    """Return ||mean of k quantisations - x|| / ||x|| for each k of DRAWS."""
    rng = np.random.default_rng(0)
    total, errors = np.zeros(x.size), []
    for k in range(1, DRAWS[-1] + 1):
        total += dequantise(*quantise(x, bits, rng, rounding=rounding), bits, x.size)
        if k in DRAWS:
            errors.append(np.linalg.norm(total / k - x) / np.linalg.norm(x))
    return errors


def main():
    images, labels, _, _ = digits()
    x = loss_and_gradient(np.zeros((65, 10), np.float32), images, labels, len(labels))[1].ravel()
    fig, ax = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    print("code               1 draw    32 draws  1024 draws")
    for bits, colour in ((2, "#D55E00"), (4, "#0072B2")):
        for rounding, style in (("stochastic", "o"), ("nearest", "s")):
            errors = errors_of_means(x, bits, rounding)
            shown = "  ".join(f"{error:10.5f}" for error in errors[::5])
            print(f"{bits} bit {rounding:10}  {shown}")
            line = "" if rounding == "stochastic" else "-"
            ax.plot(DRAWS, errors, style + line, color=colour, markersize=5)
            ax.annotate(
                f"{bits} bit, {rounding}", (DRAWS[-1], errors[-1]), (8, 0),
                textcoords="offset points", color=colour, va="center",
            )  # fmt: skip
        expected = np.sqrt(variance(x, bits) / DRAWS) / np.linalg.norm(x)
        ax.plot(DRAWS, expected, color=colour, linewidth=1)
    ax.text(16, 0.26, r"lines: expected, $\sqrt{w/k}$", color="0.35", rotation=-26)
    ax.set(xscale="log", yscale="log", xlabel="quantisations averaged, k")
    ax.set_ylabel("error of their mean / magnitude of the gradient")
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig("bias.png", dpi=110)


if __name__ == "__main__":
    main()
