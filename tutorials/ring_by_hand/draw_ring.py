"""Draw what every rank holds after each step of a ring allreduce: ring.png.

Run it: python draw_ring.py
"""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

RANKS = 4
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
)  # Okabe and Ito: safe for colour-blind readers


def stages():
    """Yield each stage's title, the ranks summed in held[rank][chunk], and the chunks received."""
    held = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
    yield "start", held, {}
    for step in range(2 * RANKS - 2):
        before = [list(row) for row in held]
        into = {}
        for rank in range(RANKS):
            # (rank - step - 1) as in collectives.py; the allgather's steps go on counting.
            chunk = into[rank] = (rank - step - 1) % RANKS
            arriving = before[(rank - 1) % RANKS][chunk]
            summing = step < RANKS - 1
            held[rank][chunk] = before[rank][chunk] | arriving if summing else arriving
        phase = "reduce-scatter" if step < RANKS - 1 else "allgather"
        yield f"{phase} {step % (RANKS - 1) + 1}", held, into


def draw_stage(ax, title, held, into):
    """Draw a cell for each rank (row) and chunk (column), a stripe in it for each rank summed."""
    for rank in range(RANKS):
        for chunk in range(RANKS):
            for owner in held[rank][chunk]:
                stripe = (chunk + 0.08 + 0.21 * owner, rank + 0.14)
                ax.add_patch(Rectangle(stripe, 0.21, 0.72, facecolor=COLOURS[owner]))
            new = into.get(rank) == chunk
            border = {"edgecolor": "black", "linewidth": 2.2} if new else {"edgecolor": "0.75"}
            ax.add_patch(Rectangle((chunk + 0.08, rank + 0.14), 0.84, 0.72, fill=False, **border))
    ax.set_title(title, fontsize=11)
    ax.set(xlim=(0, RANKS), ylim=(RANKS, 0), aspect="equal")
    ax.set_xticks([c + 0.5 for c in range(RANKS)], [f"chunk {c}" for c in range(RANKS)], fontsize=8)
    ax.set_yticks([r + 0.5 for r in range(RANKS)], [f"rank {r}" for r in range(RANKS)], fontsize=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def main():
    fig, axes = plt.subplots(2, 4, figsize=(12, 6.2), layout="constrained")
    # The start takes the left of the first row, the legend that of the second.
    places = [*axes[0], *axes[1][1:]]
    for ax, (title, held, into) in zip(places, stages(), strict=True):
        draw_stage(ax, title, held, into)
    key = [Patch(color=colour, label=f"rank {r}") for r, colour in enumerate(COLOURS)]
    key.append(Patch(fill=False, edgecolor="black", linewidth=2.2, label="just received"))
    axes[1][0].axis("off")
    axes[1][0].legend(handles=key, loc="center", frameon=False, title="summed in it: numbers of")
    fig.savefig("ring.png", dpi=110)


if __name__ == "__main__":
    main()
