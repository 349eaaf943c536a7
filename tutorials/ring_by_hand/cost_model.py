"""Predict the time of three allreduces from a network's latency and bandwidth.

Run it: python cost_model.py --ranks 64 --latency-us 2 --gb-per-s 25
    or: python cost_model.py --plot
"""

import argparse
import math


def ring_s(ranks, size_bytes, alpha, beta):
    return 2 * (ranks - 1) * (alpha + beta * size_bytes / ranks)


def recursive_doubling_s(ranks, size_bytes, alpha, beta):
    return math.log2(ranks) * (alpha + beta * size_bytes)


def through_rank_0_s(ranks, size_bytes, alpha, beta):
    return 2 * (ranks - 1) * (alpha + beta * size_bytes)


def crossover_bytes(ranks, alpha, beta):
    """Return the size from which the ring wins; none for 2 ranks, which send the same bytes."""
    more_messages = 2 * (ranks - 1) - math.log2(ranks)
    more_bytes = math.log2(ranks) - 2 * (ranks - 1) / ranks
    return alpha * more_messages / (beta * more_bytes) if more_bytes else math.inf


def words(size_bytes):
    power = min(int(math.log2(size_bytes)) // 10, 3) if math.isfinite(size_bytes) else 0
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def plot(ranks, alpha, beta):
    """Draw time against message size, with the crossover: times.png."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sizes = [2**k for k in range(6, 31)]
    fig, ax = plt.subplots(figsize=(8, 4.8), layout="constrained")
    # Colours of Okabe and Ito; each label lies along the flat part or at the end of its line.
    for model, name, colour in (
        (through_rank_0_s, "through rank 0", "#CC79A7"),
        (recursive_doubling_s, "recursive doubling", "#E69F00"),
        (ring_s, "ring", "#0072B2"),
    ):
        times_us = [1e6 * model(ranks, size, alpha, beta) for size in sizes]
        ax.plot(sizes, times_us, color=colour, linewidth=2)
        ax.annotate(
            name, (sizes[-1], times_us[-1]), (6, 0), textcoords="offset points",
            color=colour, va="center", fontweight="bold",
        )  # fmt: skip
    cross = crossover_bytes(ranks, alpha, beta)
    if math.isfinite(cross):
        cross_us = 1e6 * ring_s(ranks, cross, alpha, beta)
        ax.plot(cross, cross_us, "o", color="black")
        ax.annotate(
            f"the ring wins from {words(cross)}", (cross, cross_us), (12, -22),
            textcoords="offset points", va="center",
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="message size", ylabel="time of one allreduce")
    ticks = [2**k for k in range(6, 31, 4)]
    ax.set_xticks(ticks, [words(size) for size in ticks])
    ax.minorticks_off()
    decades = [10**k for k in range(1, 8)]
    names = "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"
    ax.set_yticks(decades, names)
    ax.set_title(
        f"{ranks} ranks, {1e6 * alpha:g} µs per message, {1e-9 / beta:g} GB/s per rank", loc="left"
    )
    ax.grid(color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig("times.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=64, help="a power of two")
    parser.add_argument("--latency-us", type=float, default=2.0, help="of one message")
    parser.add_argument("--gb-per-s", type=float, default=25.0, help="that a rank can send")
    parser.add_argument("--plot", action="store_true", help="draw times.png")
    args = parser.parse_args()
    ranks, alpha, beta = args.ranks, 1e-6 * args.latency_us, 1e-9 / args.gb_per_s
    print("     size        ring  recursive doubling  through rank 0")
    for power in (10, 16, 20, 26):
        times = [
            1e3 * model(ranks, 2**power, alpha, beta)
            for model in (ring_s, recursive_doubling_s, through_rank_0_s)
        ]
        print(
            "{:>9}  {:7.3f} ms          {:7.3f} ms     {:8.3f} ms".format(words(2**power), *times)
        )
    cross = crossover_bytes(ranks, alpha, beta)
    print(f"the ring wins from {words(cross)}" if math.isfinite(cross) else "the ring never wins")
    if args.plot:
        plot(ranks, alpha, beta)


if __name__ == "__main__":
    main()
