"""Rules and findings of the checker: position, reason, and the edit that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BY_ID", "RULES", "Edit", "Finding", "Rule", "Severity"]


class Severity(Enum):
    """Severity of a finding; the values are SARIF's levels."""

    ERROR = "error"  # wrong results, destroyed files or a job that hangs
    WARNING = "warning"  # slower, or less accurate, than intended
    NOTE = "note"  # a matter of taste


@dataclass(frozen=True)
class Rule:
    """One rule of the checker.

    Attributes:
        id: stable; the first digit is the number of the step, 0 for changes of other software, 9
            for jobs that hang.
        severity: default severity of its findings.
        title: the fault, in a few words.
        remedy: what to do, with "hvd" for the script's own alias.
    """

    id: str
    severity: Severity
    title: str
    remedy: str

    @property
    def step(self) -> int | None:
        """The number of its step, None if it belongs to none."""
        number = int(self.id[2])
        return number if 1 <= number <= 8 else None


# Their ids are stable: an id is never reused for another rule.
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# fmt: off
RULES = tuple(Rule(*row) for row in (
    ("QH001", WARNING, "not in Keras 3", "Use what Keras 3 has, or tf-keras."),
    ("QH101", ERROR, "no init", "Call hvd.init() before anything else of hvd."),
    ("QH102", ERROR, "used before init", "Move hvd.init() before this line."),
    ("QH103", ERROR, "function not called", "Call it: write the parentheses behind it."),
    ("QH201", ERROR, "GPU not pinned",
     "Choose the GPU by hvd.local_rank(), for instance torch.cuda.set_device(hvd.local_rank())."),
    ("QH301", ERROR, "data not sharded",
     "Give each rank its part: a DistributedSampler, dataset.shard(hvd.size(), hvd.rank()), or "
     "array[hvd.rank()::hvd.size()]."),
    ("QH302", WARNING, "sharded too late",
     "Call shard(hvd.size(), hvd.rank()) before shuffle() and batch()."),
    ("QH303", WARNING, "sampler without set_epoch",
     "Call sampler.set_epoch(epoch) at the beginning of each epoch."),
    ("QH304", ERROR, "sampler does not know the ranks",
     "Pass num_replicas=hvd.size(), rank=hvd.rank() to DistributedSampler."),
    ("QH305", WARNING, "ranks may have unequal numbers of batches",
     "Drop the last batch (drop_last=True, drop_remainder=True), take an equal number of "
     "batches on all ranks, or end the epoch with hvd.join()."),
    ("QH401", WARNING, "learning rate not scaled",
     "Multiply the learning rate by hvd.size(), and warm up for some epochs."),
    ("QH501", ERROR, "optimizer not wrapped",
     "Wrap it: optimizer = hvd.DistributedOptimizer(optimizer)."),
    ("QH502", ERROR, "gradient tape not wrapped",
     "Wrap it before gradient(): tape = hvd.DistributedGradientTape(tape)."),
    ("QH503", ERROR, "several optimizers without named_parameters",
     "Pass named_parameters= with names that no other optimizer has."),
    ("QH504", ERROR, "gradients clipped while they are averaged",
     "Call optimizer.synchronize() before this line, and step() within 'with "
     "optimizer.skip_synchronize():'."),
    ("QH601", ERROR, "initial state not broadcast",
     "Broadcast parameters and optimizer state from rank 0 before the first step."),
    ("QH602", WARNING, "broadcast before there is a state",
     "Broadcast when weights are loaded and the optimizer has its variables."),
    ("QH603", ERROR, "broadcast after training", "Move the broadcast before the training loop."),
    ("QH604", WARNING, "optimizer state not broadcast",
     "Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after loading it."),
    ("QH701", ERROR, "every rank writes the checkpoint", "Write it where hvd.rank() == 0."),
    ("QH702", NOTE, "every rank prints", "Print where hvd.rank() == 0."),
    ("QH703", WARNING, "every rank writes a log", "Open it where hvd.rank() == 0."),
    ("QH801", WARNING, "one rank's metric reported as the whole",
     "Average it over the ranks first: hvd.allreduce(value), or MetricAverageCallback."),
    ("QH802", WARNING, "step left because of one rank's value",
     "Average it over the ranks first, so that all of them leave: hvd.allreduce(value)."),
    ("QH901", ERROR, "collective on some ranks only",
     "Call it on every rank, outside of the branch."),
    ("QH902", ERROR, "function with a collective on some ranks only",
     "Call it on every rank, and let rank 0 alone use the result."),
    ("QH903", ERROR, "some ranks leave before a collective",
     "Let every rank come to the collective; guard only what rank 0 does alone."),
))
# fmt: on
BY_ID = {each.id: each for each in RULES}


@dataclass(frozen=True)
class Edit:
    """A replacement of text; places are (line from 1, column from 0), the end excluded."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Finding:
    """One violation of a rule.

    Attributes:
        rule: the violated rule.
        line: from 1.
        column: from 1.
        reason: the fault at this position.
        remedy: what to do.
        severity: its severity.
        edits: the edits that fix it safely; empty if only the author can fix it.
    """

    rule: Rule
    line: int
    column: int
    reason: str
    remedy: str
    severity: Severity
    edits: tuple[Edit, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether --fix can fix it."""
        return bool(self.edits)
