"""The eight steps, as data, for the tutorials, `qsgd-hpc check` and `convert`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEPS", "Step", "step"]


@dataclass(frozen=True)
class Step:
    """One of the eight differences between a serial and a distributed training script.

    Attributes:
        number: 1 to 8, in the order of a script.
        name: a few words, as in the comment `# Step 2: pin the GPU.`
        why: the fault of a script without the step.
        how: one sentence on what to do.
    """

    number: int
    name: str
    why: str
    how: str


STEPS = (
    Step(
        1,
        "init",
        "Without it no rank knows its number, and every collective raises.",
        "Call hvd.init() first; from then on every rank knows its number and how many there are.",
    ),
    Step(
        2,
        "pin the GPU",
        "Without it all ranks of a node share its first GPU.",
        "Choose the GPU with the number hvd.local_rank(), so that the ranks of a node each take "
        "their own.",
    ),
    Step(
        3,
        "shard the data",
        "Without it all ranks train on the same samples, and more ranks gain nothing.",
        "Give each rank its own part of every epoch, of equal size on all ranks.",
    ),
    Step(
        4,
        "scale the learning rate",
        "A global batch that is hvd.size() times larger needs fewer but larger steps.",
        "Multiply the learning rate by hvd.size(), and rise to it over a warm-up of some epochs.",
    ),
    Step(
        5,
        "wrap the optimizer",
        "Without it every rank trains a model of its own.",
        "Wrap the optimizer (or the gradient tape), so that each step uses the mean of all ranks' "
        "gradients.",
    ),
    Step(
        6,
        "broadcast the initial state",
        "Without it the ranks start at different weights and never agree.",
        "Broadcast parameters and optimizer state from rank 0 before the first step.",
    ),
    Step(
        7,
        "let rank 0 alone print and save",
        "Ranks that write the same file destroy it, and every line is printed once per rank.",
        "Print, log and write checkpoints where hvd.rank() == 0.",
    ),
    Step(
        8,
        "average the metrics",
        "One rank's loss or accuracy describes only its shard, not all data.",
        "Average losses and accuracies over the ranks with an allreduce before they are reported.",
    ),
)


def step(number: int) -> Step:
    """Return the step of this number, 1 to 8."""
    return STEPS[number - 1]
