"""The eight steps, and the comments and open decisions that several frameworks' rules write."""

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
    """

    number: int
    name: str
    why: str


STEPS = (
    Step(1, "init", "Without it no rank knows its number, and every collective raises."),
    Step(2, "pin the GPU", "Without it all ranks of a node share its first GPU."),
    Step(
        3,
        "shard the data",
        "Without it all ranks train on the same samples, and more ranks gain nothing.",
    ),
    Step(
        4,
        "scale the learning rate",
        "A global batch that is hvd.size() times larger needs fewer but larger steps.",
    ),
    Step(5, "wrap the optimizer", "Without it every rank trains a model of its own."),
    Step(
        6,
        "broadcast the initial state",
        "Without it the ranks start at different weights and never agree.",
    ),
    Step(
        7,
        "let rank 0 alone print and save",
        "Ranks that write the same file destroy it, and every line is printed once per rank.",
    ),
    Step(
        8,
        "average the metrics",
        "One rank's loss or accuracy describes only its shard, not all data.",
    ),
)


def step(number: int) -> Step:
    """Return the step of this number, 1 to 8."""
    return STEPS[number - 1]


# Comments on a step.
SHARD = "Rank r trains on samples r, r + size, r + 2 size, ...; all ranks have the same number."
MEAN = "Each step uses the mean of all ranks' gradients."
ALIKE = "Every rank starts with rank 0's values."
LINEAR = "A batch hvd.size() times larger needs steps hvd.size() times larger."
RISE = "The rate rises from one rank's to that of all ranks over the first epoch."
FEWER = "All ranks together take as many batches as one rank did."
PROGRESS = "One progress bar is enough."
PRINTED = "Otherwise every line would appear once per rank."
WRITTEN = "All ranks have the same state, so one copy is enough."

# Open decisions.
SHARD_IT = "shard the data: a rank's part of it, of equal size on all ranks."
WHOLE = "If each step uses all data, leave the learning rate as it was."
PLAY_IT = (
    "let each rank play other episodes: add hvd.rank() to the seeds of the environment and, after "
    "the broadcast of the parameters, of the actions."
)
SCALE_IT = "multiply the learning rate by hvd.size(), after a warm-up."
RAISE_IT = "raise the learning rate to this value over a warm-up."
PARTIAL = "{name} covers only this rank's batches: average over the ranks."
CLIP_IT = "average the gradients before clipping: see docs/training.md."
SCHEDULE = (
    "multiply the learning rates of this schedule by hvd.size(), and divide its number of steps by "
    "hvd.size(), unless it is computed from the length of a rank's part of the data."
)
