"""The rules, as data. Their ids are stable: an id is never reused for another rule."""

from __future__ import annotations

from qsgd_hpc.eight_steps.check.finding import Rule, Severity

__all__ = ["BY_ID", "RULES"]

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
