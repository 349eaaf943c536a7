"""Comments and open decisions that the rules of several frameworks write."""

from __future__ import annotations

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
PLAY_IT = (
    "let each rank play other episodes: add hvd.rank() to the seeds of the environment and, after "
    "the broadcast of the parameters, of the actions."
)
SCALE_IT = "multiply the learning rate by hvd.size(), after a warm-up."
RAISE_IT = "raise the learning rate to this value over a warm-up."
CLIP_IT = "average the gradients before clipping: see docs/training.md."
SCHEDULE = (
    "multiply the learning rates of this schedule by hvd.size(), and divide its number of steps by "
    "hvd.size(), unless it is computed from the length of a rank's part of the data."
)
