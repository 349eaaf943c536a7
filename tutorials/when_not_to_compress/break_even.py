"""Compute from three numbers of a machine which messages are worth compressing.

Run it: python break_even.py --link-gb-per-s 0.125 --codec-gb-per-s 4 --overhead-us 50
    or: python break_even.py ... --plot
"""

import argparse
import math

SIZES = [2**k for k in range(12, 31, 3)]


def words(size_bytes):
    power = min(int(math.log2(size_bytes)) // 10, 3) if size_bytes >= 1 else 0
    return f"{size_bytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def saved_s_per_byte(ranks, bits, link):
    """Return the wire time that a code saves, per byte of float32."""
    sent = 2 * (ranks - 1) / ranks
    coded = (bits + 32 / 512) / 32  # a norm of 32 bits for each bucket of 512
    return sent * (1 - coded) / link


def break_even_link(ranks, bits, codec):
    """Return the bytes per second of a link beyond which no message is worth coding."""
    return saved_s_per_byte(ranks, bits, 1) * codec


def break_even_bytes(ranks, bits, link, codec, overhead_s):
    """Return the float32 bytes of a message from which coding it pays; inf: none."""
    gain = saved_s_per_byte(ranks, bits, link) - 1 / codec
    return overhead_s / gain if gain > 0 else math.inf


def gained_s(size_bytes, ranks, bits, link, codec, overhead_s):
    """Return by how much a coded allreduce is faster than one of float32; negative: slower."""
    return size_bytes * (saved_s_per_byte(ranks, bits, link) - 1 / codec) - overhead_s


def plot(ranks, bits, link, codec, overhead_s):
    """Draw how many times as fast coding is, by link and message size: break_even.png."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    links, sizes = np.meshgrid(np.logspace(7, 10.5, 200), np.logspace(3, 9, 200))
    exact_s = 2 * (ranks - 1) / ranks * sizes / links
    ratio = exact_s / (exact_s - gained_s(sizes, ranks, bits, links, codec, overhead_s))
    fig, ax = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    bounds = [0.125, 0.25, 0.5, 1, 2, 4, 8]
    filled = ax.contourf(
        links / 1e9,
        sizes,
        np.log2(np.clip(ratio, 0.126, 7.99)),
        levels=np.log2(bounds),
        cmap="PuOr",
    )
    ax.contour(links / 1e9, sizes, ratio, levels=[1], colors="black", linewidths=2)
    bar = fig.colorbar(filled, ticks=np.log2(bounds))
    bar.set_ticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.set_label(f"times as fast as fp32, {bits} bit")
    ax.axvline(link / 1e9, color="white", linestyle=":", linewidth=2)
    ax.annotate(
        "this link",
        (link / 1e9, 2e8),
        (5, 0),
        textcoords="offset points",
        color="white",
        weight="bold",
    )
    ax.set(xscale="log", yscale="log", xlabel="link, GB/s per rank", ylabel="message size")
    ax.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    ax.set_yticks([1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9],
                  ["1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"])  # fmt: skip
    ax.minorticks_off()
    title = f"{ranks} ranks, codec {codec / 1e9:g} GB/s, {1e6 * overhead_s:g} µs to start it"
    ax.set_title(title, loc="left", fontsize=11)
    fig.savefig("break_even.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--link-gb-per-s", type=float, required=True, help="that a rank can send")
    parser.add_argument("--codec-gb-per-s", type=float, required=True, help="coded and decoded")
    parser.add_argument("--overhead-us", type=float, required=True, help="of a code, at any size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--plot", action="store_true", help="draw break_even.png")
    args = parser.parse_args()
    link, codec, overhead_s = (
        args.link_gb_per_s * 1e9,
        args.codec_gb_per_s * 1e9,
        args.overhead_us / 1e6,
    )
    machine = args.ranks, args.bits, link, codec, overhead_s
    limit = break_even_link(args.ranks, args.bits, codec)
    print(f"{args.bits} bits can pay on links below {limit / 1e9:.2f} GB/s per rank")
    least = break_even_bytes(*machine)
    print("here they pay from", words(least) if math.isfinite(least) else "no size on")
    for size in SIZES:
        exact_ms = 2e3 * (args.ranks - 1) / args.ranks * size / link
        coded_ms = exact_ms - 1e3 * gained_s(size, *machine)
        print(f"{words(size):>9}  fp32 {exact_ms:10.3f} ms  {args.bits} bit {coded_ms:10.3f} ms")
    if args.plot:
        plot(*machine)


if __name__ == "__main__":
    main()
