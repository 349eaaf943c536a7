"""Step 3 for tf.data: a shard of the source, before it is shuffled and batched."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.arrays import slice_of
from qsgd_hpc.eight_steps.convert.loops import sources
from qsgd_hpc.eight_steps.convert.opening import PIN_BY_ENVIRONMENT, imports_of
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, find, receiver

__all__ = ["is_dataset", "pin_lines", "pin_tensorflow", "shard_dataset", "takes"]

SOURCE = re.compile(r"^tensorflow\.data\.Dataset\.from_tensor_slices$")
DATASET = re.compile(
    r"^(tensorflow\.data\.|tensorflow_datasets\.|(tensorflow\.)?keras\.\w[\w.]*_dataset_from_)"
    r"|tensorflow\.data\.Dataset|\.from_tensor_slices\("
)
# Data sets that a library reads: of batches, and with attributes such as class_names.
READ = re.compile(
    r"^tensorflow_datasets\.load$"
    r"|\.((image|text|audio)_dataset_from_directory|timeseries_dataset_from_array)$"
)
CHAINED = re.compile(r"((?:\r\n?|\n)[ \t]*)\.")
TEXT = "A shard before shuffling and batching, of equal size on all ranks."
READ_TEXT = "A shard of what all ranks read in the same order, of equal size on all ranks."
SEQUENCES = "A shard of the sequences, before shuffling, of equal size on all ranks."
BEHIND = "A shard of this part, which all ranks split off alike, of equal size on all ranks."


def chain(node: cst.BaseExpression | None) -> list[cst.Call]:
    """Return the calls of `a(...).b(...).c(...)` in the order c, b, a."""
    found = []
    while isinstance(node, cst.Call):
        found.append(node)
        node = receiver(node)
    return found


def is_dataset(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a data set of TensorFlow, as far as the text shows."""
    named = any(DATASET.search(script.qualified(each)) for each in sources(script, node))
    return named or bool(origins(script, node) or _read_by(script, node))  # of long chains


def origins(script: Script, node: cst.BaseExpression, depth: int = 8) -> list[cst.Call]:
    """Return the calls of from_tensor_slices that a data set comes from."""
    found: list[cst.Call] = []
    for each in sources(script, node):
        calls = chain(each)
        if not calls:
            continue
        if SOURCE.match(script.called(calls[-1])):
            found.append(calls[-1])
            continue
        if depth:
            for further in _made_from(script, calls[-1]):
                found += origins(script, further, depth - 1)
    return list(dict.fromkeys(found))


def _made_from(script: Script, first: cst.Call) -> list[cst.BaseExpression]:
    """Return the data sets to which a chain adds its calls, for the first of these calls."""
    made_by = receiver(first)
    if made_by is not None and dotted(made_by):
        return [made_by]
    definition = script.definition(first)
    inner = script.inside(definition) if definition is not None else ()
    return [each.value for each in inner if isinstance(each, cst.Return) and each.value is not None]


def _methods(
    script: Script, node: cst.BaseExpression, depth: int = 8
) -> list[tuple[str, cst.Call]]:
    """Return the methods that make a data set and their calls, the last one first."""
    made = sources(script, node)
    calls = chain(made[0]) if len(made) == 1 else []
    found = [(c.func.attr.value, c) for c in calls if isinstance(c.func, cst.Attribute)]
    further = _made_from(script, calls[-1]) if calls and depth else []
    return found + (_methods(script, further[0], depth - 1) if len(further) == 1 else [])


def _split(script: Script, node: cst.BaseExpression) -> tuple[str, cst.Call] | None:
    """Return the last take() or skip() that makes a data set of a part of another.

    A take() of batches makes no part of it if the data set repeats, or if it has no other use.
    """
    methods = _methods(script, node)
    for index, (name, call) in enumerate(methods):
        repeats = any(further == "repeat" for further, _ in methods[index:])
        if name in ("take", "skip") and call.args and not repeats:
            return None if _limits(script, call) else (name, call)
    return None


def _limits(script: Script, call: cst.Call) -> bool:
    """Return whether a call is `for batch in data.take(n)`, for data of no other use."""
    data = receiver(call, "take")
    others = (
        node
        for node in script.nodes
        if node is not data
        and dotted(node) == dotted(data)
        and not isinstance(parent := script.parents.get(node), cst.AssignTarget)
        and getattr(parent, "attr", None) is not node  # as in tf.data
    )
    around = [call, *script.ancestors(call)]
    header = any(isinstance(a, cst.For) and any(a.iter is b for b in around) for a in around)
    return bool(header and dotted(data) and not any(others))


def _shard_part(plan: Plan, name: str, call: cst.Call) -> None:
    """Shard what take() returns: a shard of its source would leave too little to others."""
    script = plan.script
    if call in plan.sharded:
        return
    plan.sharded.add(call)
    callers = script.calls_of(script.function(call))
    _split_alike(plan, call)
    if name == "skip" or len(callers) > 1:
        plan.todo(
            call,
            f"shard this data set after {name}(): .shard(hvd.size(), hvd.rank()), of equal size "
            "on all ranks.",
        )
        return
    plan.step(3, BEHIND, call)
    _append_shard(plan, call, f"{script.operand(call.args[0].value)} // hvd.size()")


def _split_alike(plan: Plan, call: cst.Call) -> None:
    """Let all ranks shuffle alike before they split: one's training data may be others' tests."""
    script = plan.script
    shuffles = [each for name, each in _methods(script, call) if name == "shuffle"]
    if not shuffles:
        return
    plan.alike = True
    seeded = any(script.called(c).endswith(("set_random_seed", "set_seed")) for c in script.calls)
    for each in shuffles:
        if not seeded and find(each, "seed", 1) is None:
            plan.todo(each, "give this shuffle() a seed: all ranks must split equally.")


def _parts(script: Script, node: cst.BaseExpression) -> tuple[cst.BaseExpression, ...]:
    """Return the data sets of `Dataset.zip((a, b))` or `as_numpy(a)`, or those of none."""
    made = sources(script, node)
    call = made[0] if len(made) == 1 else None
    first = (chain(call) or [None])[-1]
    name = script.called(first)
    if first is None or not first.args or not re.search(r"Dataset\.zip$|\.as_numpy$", name):
        return ()
    given = first.args[0].value
    if isinstance(given, cst.Tuple | cst.List):
        return tuple(each.value for each in given.elements)
    return tuple(arg.value for arg in first.args)


def _read_by(
    script: Script, node: cst.BaseExpression, depth: int = 8
) -> tuple[cst.BaseExpression, cst.Call] | None:
    """Return the name of the data set that a library reads, along a chain, and its call."""
    bound = script.binding(node) if dotted(node) else None
    made = bound.value if bound is not None else node
    if bound is not None and bound.how == "parameter":
        given = [each for each in script.passed(bound) if each is not None]
        made = given[0] if len(given) == 1 else None
    elif bound is not None:
        read = script.value(made.value) if isinstance(made, cst.Subscript) else made
        named = script.binding(read) if dotted(read) else None
        for call in (read, named.value if named is not None else None):
            if isinstance(call, cst.Call) and READ.search(script.called(call)):
                return node, call
    calls = chain(made)
    further = receiver(calls[-1]) if calls else made
    if further is None or further is node or not depth:
        return None
    return _read_by(script, further, depth - 1)


def _shard_read(plan: Plan, node: cst.BaseExpression, read: cst.Call, at: cst.CSTNode) -> None:
    """Shard what a library reads where the chain for training uses it: other uses need all."""
    script = plan.script
    if node in plan.sharded:
        return
    plan.sharded.add(node)
    of_files = find(read, "shuffle_files")
    order = find(read, "shuffle")
    if of_files is not None:
        plan.replace(of_files.value, f"{script.operand(of_files.value)} and hvd.size() == 1")
    elif "_from_directory" in script.called(read) or order is not None:
        plan.alike = True  # it shuffles before the shard
        if find(read, "seed") is None:
            plan.add_argument(read, "seed=None if hvd.size() == 1 else 0")
    name = script.code(node)
    shard = f"{name}.shard(hvd.size(), hvd.rank()).take(len({name}) // hvd.size())"
    if isinstance(at, cst.For | cst.While) and at in script.ancestors(node):
        outer = (*script.loops(node), at)[-1]
        plan.step(3, READ_TEXT, outer, f"{name} = {shard}")
    else:
        plan.step(3, READ_TEXT, node, once=True)
        plan.replace(node, shard)


def _append_shard(plan: Plan, call: cst.Call, size: str) -> None:
    """Add a shard of equal size to a call, on separate lines if each call of its chain is."""
    _, end = plan.script.span(call)
    chained = CHAINED.match(plan.script.text, end)
    break_ = chained.group(1) if chained else ""
    plan.wrap(call, "", f"{break_}.shard(hvd.size(), hvd.rank()){break_}.take({size})")


def shard_dataset(plan: Plan, node: cst.BaseExpression, at: cst.CSTNode) -> None:
    """Shard the source of a data set; add a TODO if the text does not show it.

    Args:
        plan: the plan to extend.
        node: the data set for training.
        at: its use, for a TODO.
    """
    script = plan.script
    found = origins(script, node)
    split = _split(script, node) if found or is_dataset(script, node) else None
    if split is not None:
        _shard_part(plan, *split)
        return
    if parts := _parts(script, node):
        for each in parts:
            shard_dataset(plan, each, at)
        return
    read = _read_by(script, node)
    if read is not None:
        _shard_read(plan, *read, at)
        return
    drawn = _iterator(script, node)
    if drawn:
        plan.todo(at, drawn)
        return
    if len(found) != 1:
        text = "shard this data set, before it is shuffled: ds.shard(hvd.size(), hvd.rank()), with "
        plan.todo(at, f"{text}equally many batches on all ranks.")
        return
    call = found[0]
    if call in plan.sharded:
        return
    plan.sharded.add(call)
    methods = _methods(script, node)
    if any(name == "window" for name, _ in methods):
        text = "shard the windows of this data set, not their elements: after flat_map(), "
        plan.todo(at, f"{text}.shard(hvd.size(), hvd.rank()), with equally many on all ranks.")
        return
    given = call.args[0].value
    first = given.elements[0].value if isinstance(given, cst.Tuple | cst.List) else given
    size, text = f"len({dotted(first)})", TEXT
    joins = [each for name, each in methods if name.endswith("batch")]
    if len(joins) > 1 and joins[-1].args and not any(name == "unbatch" for name, _ in methods):
        call, text = joins[-1], SEQUENCES
        size += f" // {script.operand(call.args[0].value)}"
    if len(script.calls_of(script.function(call))) > 1:
        plan.todo(
            call, "the data set for training needs .shard(hvd.size(), hvd.rank()) here, others not."
        )
        return
    if not dotted(first):
        plan.todo(call, "shard this: .shard(hvd.size(), hvd.rank()), of equal size on all ranks.")
        return
    plan.step(3, text, call)
    _append_shard(plan, call, f"{size} // hvd.size()")


def _iterator(script: Script, node: cst.BaseExpression) -> str:
    """Return how to shard what an iterator of Keras draws from, "" for other data sets."""
    for each in sources(script, node):
        name = script.called(each)
        if name.endswith(".flow"):
            return f"give flow() a rank's part, x[shard] and y[shard]: shard = {slice_of('x')}."
        if ".flow_from_" in name:
            return "give each rank other files, as many as the other ranks: this has no shard()."
    return ""


def takes(plan: Plan, node: cst.BaseExpression) -> None:
    """Divide a number of batches to take by the number of ranks."""
    script = plan.script
    for made in sources(script, node):
        methods = _methods(script, made)
        for index, (name, call) in enumerate(methods):
            if name != "take" or not call.args or call in plan.sharded:
                continue
            repeated = any(further == "repeat" for further, _ in methods[index:])
            if repeated or script.loops(call) or call is made:
                count = call.args[0].value
                plan.sharded.add(call)
                plan.replace(count, f"{script.operand(count)} // hvd.size()")
                plan.step(3, words.FEWER, call)


def pin_tensorflow(tf: str) -> list[str]:
    """Return the lines that choose a rank's GPU in TensorFlow 2, by its name in the script."""
    return [
        f'gpus = {tf}.config.list_physical_devices("GPU")',
        "if gpus:",
        f'    {tf}.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")',
    ]


def pin_lines(script: Script) -> list[str]:
    """Return the lines that choose a rank's GPU in Keras, by its backend if that is unknown."""
    tf = script.name_of("tensorflow")
    if tf:
        return pin_tensorflow(tf)
    return [
        'if keras.backend.backend() == "tensorflow":',
        "    import tensorflow as tf",
        "",
        *(f"    {line}" for line in pin_tensorflow("tf")),
        'elif keras.backend.backend() == "torch":',
        "    import torch",
        "",
        "    if torch.cuda.is_available():",
        "        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())",
        "else:",
        *(line for each in imports_of(script, "os") for line in (f"    {each}", "")),
        *(f"    {line}" for line in PIN_BY_ENVIRONMENT),
    ]
