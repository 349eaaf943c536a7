"""Measure what quantising loses by bits, bucket size and ranks, beside the formulae: error.png.

Run it: python see_error.py
"""

import matplotlib
import numpy as np
from qsgd import dequantise, levels, quantise, variance

matplotlib.use("agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.45"
BITS, BUCKETS, RANKS = range(2, 9), 2 ** np.arange(4, 14), 2 ** np.arange(1, 7)


def code(x, bits, rng, **how):
    """Return x as the receiver sees it."""
    return dequantise(*quantise(x, bits, rng, **how), bits, x.size)


def lost(x, decoded):
    return np.sum((decoded - x) ** 2) / np.sum(x**2)


def lemma_3_1(bits, bucket_size):
    """Return the paper's bound on the variance for the L2 norm, over the squared magnitude."""
    s = levels(bits)
    return min(bucket_size / s**2, np.sqrt(bucket_size) / s)


def reductions(gradients, bits, rng):
    """Yield the name of each way to sum quantised gradients, and its result."""
    ranks = len(gradients)
    yield "allgather", sum(code(g, bits, rng) for g in gradients)
    chunks = [np.split(g, ranks) for g in gradients]
    owned = [  # the owner adds its own share as it is, and all others as they arrive
        sum(chunks[r][c] if r == c else code(chunks[r][c], bits, rng) for r in range(ranks))
        for c in range(ranks)
    ]
    yield "sra", np.concatenate([code(chunk, bits, rng) for chunk in owned])
    ring = [chunks[c][c] for c in range(ranks)]  # chunk c starts at rank c and goes round
    for step in range(1, ranks):
        ring = [code(ring[c], bits, rng) + chunks[(c + step) % ranks][c] for c in range(ranks)]
    yield "ring", np.concatenate([code(chunk, bits, rng) for chunk in ring])


def draw_codes(axes, x, rng):
    """Draw one code's error: measured as dots, expected as lines, the paper's bound dashed."""
    print("w measured (expected), bucket of 512       max norm                  L2 norm   bound")
    for bits in BITS:
        row = [(lost(x, code(x, bits, rng, norm=n)), n) for n in ("max", "l2")]
        shown = [f"{w:.2e} ({variance(x, bits, norm=n) / np.sum(x**2):.2e})" for w, n in row]
        print(f"{bits} bit {shown[0]:>41} {shown[1]:>24} {lemma_3_1(bits, 512):7.3f}")
    for norm, colour in (("max", BLUE), ("l2", ORANGE)):
        by_bits = [{"bits": b, "bucket_size": 512} for b in BITS]
        by_bucket = [{"bits": 4, "bucket_size": int(d)} for d in BUCKETS]
        for ax, at, how in ((axes[0], BITS, by_bits), (axes[1], BUCKETS, by_bucket)):
            ax.plot(at, [lost(x, code(x, rng=rng, norm=norm, **h)) for h in how], "o", color=colour)
            expected = [variance(x, norm=norm, **h) / np.sum(x**2) for h in how]
            ax.plot(at, expected, color=colour, linewidth=1)
    axes[0].plot(BITS, [lemma_3_1(b, 512) for b in BITS], "--", color=GREY)
    axes[1].plot(BUCKETS, [lemma_3_1(4, d) for d in BUCKETS], "--", color=GREY)
    for ax, at in ((axes[0], (6.2, 0.8)), (axes[1], (45, 2.6))):
        ax.text(*at, "bound for L2", color=GREY)
    axes[0].text(5.2, 0.035, "L2 norm", color=ORANGE, ha="left")
    axes[0].text(2.4, 0.025, "max norm", color=BLUE)
    axes[1].text(700, 0.75, "L2 norm", color=ORANGE)
    axes[1].text(700, 0.016, "max norm", color=BLUE)
    axes[0].set(xlabel="bits per element (bucket of 512)", yscale="log")
    axes[0].set_ylabel("w, error² / gradient²")
    axes[1].set(xlabel="bucket size (4 bits)", xscale="log", yscale="log")
    axes[1].set_ylabel("w, error² / gradient²")
    axes[1].set_xticks(BUCKETS[::2], BUCKETS[::2])
    axes[1].minorticks_off()


def draw_ranks(ax, rng):
    """Draw the error of a sum over ranks, in units of one code's."""
    print("\nerror of the sum over w, 8 bits   allgather     sra    ring")
    measured = {}
    for ranks in RANKS:
        gradients = rng.standard_normal((ranks, 64 * 512)).astype(np.float32)
        w = np.mean([lost(g, code(g, 8, rng)) for g in gradients[:4]])
        exact = gradients.sum(axis=0)
        row = {name: lost(exact, sum_) / w for name, sum_ in reductions(gradients, 8, rng)}
        print(f"{ranks:3} ranks {'':24}" + "".join(f"{v:8.2f}" for v in row.values()))
        for name, value in row.items():
            measured.setdefault(name, []).append(value)
    formulae = {"allgather": 1 + 0 * RANKS, "sra": 2 - 1 / RANKS, "ring": (RANKS + 1) / 2}
    for (name, values), colour in zip(measured.items(), (GREEN, BLUE, ORANGE), strict=True):
        ax.plot(RANKS, values, "o", color=colour)
        ax.plot(RANKS, formulae[name], color=colour, linewidth=1)
        label = {"sra": "SRA", "ring": "ring that\nrequantises"}.get(name, name)
        ax.annotate(label, (RANKS[-1], values[-1]), (-14, 6), textcoords="offset points",
                    color=colour, ha="right", va="bottom" if name != "ring" else "top")  # fmt: skip
    ax.set(xlabel="ranks (8 bits)", xscale="log", yscale="log")
    ax.set_ylabel("error² of the sum, in w of one code")
    ax.set_xticks(RANKS, RANKS)
    ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()


def main():
    rng = np.random.default_rng(0)
    fig, axes = plt.subplots(1, 3, figsize=(13.5, 4.3), layout="constrained")
    draw_codes(axes, rng.standard_normal(2**18).astype(np.float32), rng)
    draw_ranks(axes[2], rng)
    for ax in axes:
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig("error.png", dpi=100)


if __name__ == "__main__":
    main()
