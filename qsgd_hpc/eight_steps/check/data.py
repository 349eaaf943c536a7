"""Step 3: every rank trains on its own part of the data, with the same number of batches."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, Severity, add_argument, insert_before
from qsgd_hpc.eight_steps.check.reach import Reach
from qsgd_hpc.eight_steps.reading import Framework, Loop, argument, dotted, find

__all__ = ["check"]

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = "torch.utils.data.distributed.DistributedSampler"
SAMPLERS = (SAMPLER, "torch.utils.data.DistributedSampler")
OWN_SHARDS = ("ElasticSampler", "DistributedSampler")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of step 3."""
    yield from check_samplers(facts)
    yield from check_order(facts)
    if not facts.trains:
        return
    kinds = facts.script.frameworks
    if Framework.TORCH in kinds:
        yield from check_loaders(facts)
    if Framework.KERAS in kinds:
        yield from check_fit(facts)
    if kinds & {Framework.TF2, Framework.TF1}:
        yield from check_datasets(facts)


def training_loops(facts: Facts) -> tuple[Loop, ...]:
    """Return the loops around training, each once."""
    found: dict[Loop, None] = {}
    for place in facts.training:
        for loop in facts.events[place].loops(facts.script):
            found[loop] = None
    return tuple(found)


def trained_on(facts: Facts) -> Reach:
    """Return the possible origins of the iterables of the loops around training."""
    each = [loop.iter for loop in training_loops(facts) if isinstance(loop, cst.For)]
    for place in facts.training:
        for site in facts.events[place].sites():
            around = facts.script.ancestors(site)
            each += [node.for_in.iter for node in around if isinstance(node, cst.BaseComp)]
    return facts.reach(*each)


def is_sharded(facts: Facts, *nodes: cst.CSTNode) -> bool:
    found = facts.reach(*nodes)
    if found.shares() or found.api & set(OWN_SHARDS):
        return True
    if facts.helpers.names & {"rank", "size"}:
        return True  # a helper may have made the data
    return any(facts.called[call] in SAMPLERS and not has_one_part(call) for call in found.calls)


def has_one_part(sampler: cst.Call) -> bool:
    """Return whether a sampler has `num_replicas=1`, as in a script before it is distributed."""
    parts = argument(sampler, "num_replicas", 1)
    return isinstance(parts, cst.Integer) and parts.evaluated_value == 1


def check_loaders(facts: Facts) -> Iterator[Finding]:
    script = facts.script
    trained = trained_on(facts).calls
    loaders = [c for c in script.calls if facts.called[c] in LOADERS and c in trained]
    sharded = [call for call in loaders if is_sharded(facts, call)]
    for call in loaders:
        if call in sharded and unequal(facts, call):
            reason = "a rank with a larger share takes one more batch and waits forever"
            edits = (add_argument(script, call, "drop_last=True"),)
            yield facts.finding("QH305", call, reason, edits=edits)
        elif not sharded:  # else one function may train and validate, and get the loaders of both
            reason = "every rank trains on all of it"
            yield facts.finding("QH301", call, reason, edits=loader_edits(facts, call), absent=True)


def loader_edits(facts: Facts, call: cst.Call) -> tuple[Edit, ...]:
    """Return the edits that replace the shuffle argument of a loader by a sampler."""
    script, hvd = facts.script, facts.script.alias
    dataset = argument(call, "dataset", 0)
    whole = any(i.module == "torch" and i.alias == "torch" for i in script.imports)
    ways = ("sampler", "batch_sampler")
    taken = any(argument(call, name) is not None for name in ways) or (
        sum(each.keyword is None for each in call.args) > 2
    )
    if not whole or taken or not dotted(dataset) or any(each.star for each in call.args):
        return ()
    name = script.code(dataset) if dataset is not None else ""
    ranks = f"num_replicas={hvd}.size(), rank={hvd}.rank()"
    shuffle = find(call, "shuffle")
    shuffles = dotted(shuffle.value) if shuffle is not None else "False"
    if shuffles not in ("True", "False"):
        return ()
    order = "" if shuffles == "True" else ", shuffle=False"
    sampler = f"sampler={SAMPLER}({name}, {ranks}{order})"
    if shuffle is None:
        return (add_argument(script, call, sampler),)
    return (Edit(script.start(shuffle), script.end(shuffle.value), sampler),)


def unequal(facts: Facts, call: cst.Call) -> bool:
    """Return whether the number of a loader's batches may differ between ranks."""
    if facts.uses("join", "ElasticSampler"):
        return False
    found = facts.reach(call)
    if any(facts.called[each] in SAMPLERS for each in found.calls):
        return False  # the sampler makes the parts equal
    if argument(call, "batch_sampler") is not None or argument(call, "sampler") is not None:
        return False
    last = argument(call, "drop_last")
    if last is not None or any(each.star for each in call.args):
        return False
    dataset = argument(call, "dataset", 0)
    made = facts.script.value(dataset) if dataset is not None else None
    return made is not None and sliced_by_rank(facts, made)


def sliced_by_rank(facts: Facts, made: cst.CSTNode) -> bool:
    """Return whether a data set is `Subset(data, range(rank, n, size))` or `data[rank::size]`."""
    if isinstance(made, cst.Call) and facts.called[made] == "torch.utils.data.Subset":
        return facts.reach(made).shares()
    slices = [n for n in facts.script.inside(made) if isinstance(n, cst.Slice) and n.step]
    return any("size" in facts.reach(n).api for n in slices)


def check_samplers(facts: Facts) -> Iterator[Finding]:
    script = facts.script
    for call in script.calls:
        if facts.called[call] not in SAMPLERS or any(each.star for each in call.args):
            continue
        missing = [
            f"{name}={script.alias}.{function}()"
            for name, place, function in (("num_replicas", 1, "size"), ("rank", 2, "rank"))
            if argument(call, name, place) is None
        ]
        if missing and not facts.mentions("init_process_group"):
            yield facts.finding(
                "QH304",
                call,
                "it takes the ranks from torch.distributed, which was not started",
                edits=(add_argument(script, call, ", ".join(missing)),),
            )
        elif needs_epochs(facts, call):
            reason = "every epoch has the same order"
            yield facts.finding("QH303", call, reason, edits=epoch_edits(facts))


def needs_epochs(facts: Facts, call: cst.Call) -> bool:
    """Return whether a sampler shuffles for several epochs, but set_epoch is never called."""
    if facts.mentions("set_epoch") or dotted(argument(call, "shuffle", 3)) == "False":
        return False
    if argument(call, "shuffle", 3) is not None and not facts.trains:
        return False
    loops = [loop for loop in training_loops(facts) if isinstance(loop, cst.For)]
    return len(loops) > 1 and call in trained_on(facts).calls


def epoch_edits(facts: Facts) -> tuple[Edit, ...]:
    """Return the edits that call set_epoch before the loop over the batches."""
    script = facts.script
    for place in facts.training:
        loops = [x for x in facts.events[place].loops(script) if isinstance(x, cst.For)]
        if len(loops) < 2 or script.function(loops[0]) is not script.function(loops[1]):
            continue
        loader = inner_loader(facts, loops[0])
        if not isinstance(loops[1].target, cst.Name) or not loader:
            continue
        epoch = loops[1].target.value
        return insert_before(script, loops[0], f"{loader}.sampler.set_epoch({epoch})")
    return ()


def inner_loader(facts: Facts, loop: cst.For) -> str:
    """Return the name of the loader that a loop iterates over."""
    for node in facts.script.inside(loop.iter):
        if isinstance(node, (cst.Name, cst.Attribute)) and dotted(node):
            made = facts.script.value(node)
            if isinstance(made, cst.Call) and facts.called[made] in LOADERS:
                return dotted(node)
    return ""


def check_fit(facts: Facts) -> Iterator[Finding]:
    for place in facts.training:
        call = facts.events[place].call
        if facts.method(call) not in ("fit", "fit_generator") or not call.args:
            continue
        named = [a.value for a in call.args if a.keyword is None or a.keyword.value in COUNTED]
        if any(each.star for each in call.args) or is_sharded(facts, *named):
            continue
        yield facts.finding(
            "QH301",
            call,
            "every rank fits on all of the data, for all of the epochs",
            absent=True,
            remedy="Fit on x[hvd.rank()::hvd.size()], or divide the epochs or steps_per_epoch by "
            "hvd.size().",
        )


COUNTED = ("x", "y", "epochs", "steps_per_epoch", "generator")


def check_datasets(facts: Facts) -> Iterator[Finding]:
    """Find loops over a tf.data.Dataset that is the same on all ranks."""
    script = facts.script
    found = trained_on(facts)
    made = [c for c in script.calls if c in found.calls and is_dataset(facts.called[c])]
    if not made or found.shares() or is_sharded(facts, made[0]):
        return
    reason = "every rank trains on all of it"
    yield facts.finding("QH301", made[0], reason, absent=True)


def is_dataset(name: str) -> bool:
    parts = name.removeprefix("tensorflow.data.").split(".")
    return name.startswith("tensorflow.data.") and len(parts) <= 2 and "()" not in name


def check_order(facts: Facts) -> Iterator[Finding]:
    """Find `shard` after `shuffle` without a seed, or after `batch`."""
    script = facts.script
    if not facts.uses("size", "rank"):
        return
    for call in script.calls:
        if facts.method(call) != "shard" or "tensorflow." not in facts.called[call]:
            continue
        for made in _made_from(facts, call):
            before = facts.method(made)
            if before == "shuffle" and argument(made, "seed", 1) is None:
                reason = "each rank shuffles differently before, so that parts overlap"
                yield facts.finding("QH302", call, reason)
                break
            if before == "batch" and not _is_batched(facts, call):
                reason = "complete batches are distributed, and all ranks read all of the data"
                yield facts.finding("QH302", call, reason, severity=Severity.NOTE)
                break


def _made_from(facts: Facts, call: cst.Call) -> Iterator[cst.Call]:
    """Yield the calls that make the data set whose method is called, the last one first."""
    node: cst.CSTNode = call.func
    while isinstance(node, cst.Attribute):
        made = facts.script.value(node.value)
        if not isinstance(made, cst.Call):
            break
        yield made
        node = made.func


def _is_batched(facts: Facts, call: cst.Call) -> bool:
    """Return whether batches are made of a data set: what an earlier batch() made are samples."""
    batches = (each for each in facts.script.calls if facts.method(each).endswith("batch"))
    return any(call in _made_from(facts, each) for each in batches)
