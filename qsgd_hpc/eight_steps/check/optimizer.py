"""Steps 4 and 5: the learning rate, and the optimizer or tape that averages gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import (
    Edit,
    Finding,
    Severity,
    insert_after,
    insert_before,
    replace,
)
from qsgd_hpc.eight_steps.reading import (
    Framework,
    argument,
    dotted,
    has_own_rate,
    is_optimizer_name,
    is_scheduler,
    receiver,
)

__all__ = ["check", "constructors"]

MAKERS = re.compile(
    r"^(torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w+"
    r"|(tensorflow\.|tf_keras\.)?keras\.(src\.)?optimizers\.(legacy\.|experimental\.)?[A-Z]\w+"
    r"|tensorflow\.optimizers\.(legacy\.|experimental\.)?[A-Z]\w+"
    r"|tensorflow\.(compat\.v1\.)?train\.\w+Optimizer"
    r"|optax\.(sgd|adam|adamw|rmsprop|adagrad|lamb|lars|nadam|radam|adafactor|lion|yogi))$"
)
NOT_MAKERS = ("schedules", "Optimizer")
OTHER_WAYS = ("DistributedDataParallel", "fully_shard", "FullyShardedDataParallel", "MpiDDP")
RATE = re.compile(r"(^|_|\b)(lr|rate|warm_?up|peak|batch_size)", re.IGNORECASE)
SCHEDULE = re.compile(r"[Ss]chedul|LambdaLR|^batch$")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of steps 4 and 5."""
    if facts.trains:
        yield from check_rate(facts)
        yield from check_wrapped(facts)
        yield from check_tape(facts)
    yield from check_names(facts)
    yield from check_clipping(facts)


def constructors(facts: Facts) -> tuple[cst.Call, ...]:
    """Return the calls that make optimizers, in order."""
    return tuple(
        call
        for call, name in facts.called.items()
        if MAKERS.match(name) and name.rpartition(".")[2] not in NOT_MAKERS
    )


def check_rate(facts: Facts) -> Iterator[Finding]:
    made = [each for each in constructors(facts) if not has_own_rate(facts.called[each])]
    # Adasum needs no larger rate.
    if not made or facts.uses("Adasum") or not facts.uses("DistributedOptimizer", *TAPES):
        return
    if "size" in facts.helpers.names or scales_elsewhere(facts):
        return
    call = made[0]
    if any("size" in facts.reach(each).api for each in made):
        return
    given = rate_of(call)
    if given is None:
        yield facts.finding("QH401", call, "its learning rate is the default, whatever the ranks")
        return
    text = facts.script.code(given)
    scaled = f"{facts.script.alias}.size()"
    edit = replace(facts.script, given, f"{facts.script.operand(given)} * {scaled}")
    edits = () if isinstance(given, cst.SimpleString) or is_schedule(facts, given) else (edit,)
    reason = f"learning rate {text} does not depend on the number of ranks"
    yield facts.finding("QH401", call, reason, edits=edits)


def rate_of(call: cst.Call) -> cst.BaseExpression | None:
    """Return the argument that is the learning rate."""
    for name in ("lr", "learning_rate"):
        if (given := argument(call, name)) is not None:
            return given
    return None if argument(call, "params") is not None else first_rate(call)


def first_rate(call: cst.Call) -> cst.BaseExpression | None:
    """Return a positional rate: the only argument, or the second one after parameters."""
    placed = [each.value for each in call.args if each.keyword is None and not each.star]
    func = placed[0].func if placed and isinstance(placed[0], cst.Call) else None
    if isinstance(func, cst.Attribute) and func.attr.value.endswith("parameters"):
        return placed[1] if len(placed) > 1 else None
    return placed[0] if len(placed) == 1 else None


def is_schedule(facts: Facts, given: cst.BaseExpression) -> bool:
    """Return whether a rate may be an object that cannot be multiplied by a number."""
    made = facts.script.value(given)
    return isinstance(made, cst.Call) and facts.method(made) not in ("float", "int", "min", "max")


def scales_elsewhere(facts: Facts) -> bool:
    """Return whether a value named like a rate or a batch depends on the number of ranks."""
    nodes = (each for node in facts.script.nodes for each in rates(facts, node))
    return any("size" in facts.reach(each).api for each in nodes)


def rates(facts: Facts, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the values that a node assigns or passes to a rate, a schedule or a batch, by name."""
    code = facts.script.code
    if (isinstance(node, cst.Assign) and any(RATE.search(code(each)) for each in node.targets)) or (
        isinstance(node, cst.AugAssign) and RATE.search(code(node.target))
    ):
        yield node.value
    elif isinstance(node, cst.Arg) and node.keyword is not None:
        if RATE.search(node.keyword.value):
            yield node.value
    elif isinstance(node, cst.Call) and SCHEDULE.search(facts.method(node)):
        yield from (each.value for each in node.args)


TAPES = ("DistributedGradientTape", "PartialDistributedGradientTape")
WRAPPERS = (
    "DistributedOptimizer", "PartialDistributedOptimizer", "DistributedAdasumOptimizer",
    "load_model",
)  # fmt: skip


REDUCTIONS = frozenset(
    f"{group}allreduce{suffix}"
    for group in ("", "grouped_", "sparse_")
    for suffix in ("", "_", "_async", "_async_")
)


def averages_itself(facts: Facts) -> bool:
    """Return whether gradients are averaged in another way than by a wrapper."""
    if facts.uses("allreduce_gradients", *TAPES) or facts.mentions(*OTHER_WAYS):
        return True
    script = facts.script
    for node in script.nodes:
        if isinstance(node, cst.Attribute) and script.api(node) in REDUCTIONS:
            loops = [loop.iter for loop in script.loops(node) if isinstance(loop, cst.For)]
            around = [script.statement(node), *loops]
            if any("grad" in script.code(each) for each in around):
                return True
    return False


def check_wrapped(facts: Facts) -> Iterator[Finding]:
    if averages_itself(facts):
        return
    script = facts.script
    wrapped: set[cst.Call] = set()
    for call in script.calls:
        if script.definition(call) is not None:
            continue
        # A wrapper, or a function of another module that the optimizer is passed to.
        is_wrapper = script.api_names(call) & set(WRAPPERS)
        if is_wrapper or is_unread(facts, call):
            for each in call.args:
                wrapped |= facts.reach(each.value).calls
    if facts.helpers.names & set(WRAPPERS):
        return
    kinds = script.frameworks
    for made in constructors(facts):
        if Framework.TF2 in kinds and Framework.KERAS not in kinds:
            continue  # check_tape checks its tape instead
        if made in wrapped or not trained_with(facts, made):
            continue
        edits = () if in_wrapper(facts, made) else wrap_edits(facts, made)
        reason = f"{script.code(made.func)} uses only the gradients of its own rank"
        yield facts.finding("QH501", made, reason, edits=edits, absent=True)
    for made in others(facts):
        if made not in wrapped:
            reason = f"{script.code(made.func)} may use only the gradients of its own rank"
            yield facts.finding("QH501", made, reason, severity=Severity.WARNING, absent=True)
    yield from check_unused(facts)
    yield from check_named(facts)


def others(facts: Facts) -> tuple[cst.Call, ...]:
    """Return the calls of other packages that make optimizers, by their names and steps."""
    script = facts.script
    if Framework.TORCH not in script.frameworks:
        return ()
    known = {*constructors(facts), *facts.calls(*WRAPPERS)}
    found: dict[cst.Call, None] = {}
    for call in script.calls:
        stepped = receiver(call, "step")
        made = script.value(stepped) if stepped is not None else None
        if stepped is None or not isinstance(made, cst.Call) or not is_optimizer_name(stepped):
            continue
        if is_scheduler(facts.called.get(made, "")):
            continue
        first = next((n for n in script.inside(made.func) if isinstance(n, cst.Name)), made.func)
        bound = script.binding(first)
        imported = bound is not None and bound.how == "import"
        is_class = facts.method(made)[:1].isupper()  # an unread function may wrap what it returns
        if imported and made not in known and (is_class or not is_unread(facts, made)):
            found[made] = None
    return tuple(found)


def is_unread(facts: Facts, call: cst.Call) -> bool:
    """Return whether a call is of a module that is next to the script or could not be read."""
    top = facts.called[call].partition(".")[0]
    return top in facts.helpers.read or top in facts.helpers.unread


def in_wrapper(facts: Facts, made: cst.Call) -> bool:
    script = facts.script
    return any(script.api_names(n) for n in script.ancestors(made) if isinstance(n, cst.Call))


def trained_with(facts: Facts, made: cst.Call) -> bool:
    """Return whether training uses this optimizer, as far as the text shows."""
    script = facts.script
    verbs = ("step", "minimize", "apply_gradients", "compile", "update", "fit", "create")
    for call in script.calls:
        if facts.method(call) in verbs:
            owner = receiver(call)
            if owner is not None and script.value(owner) is made:
                return True
            if any(made in facts.reach(a.value).calls for a in call.args):
                return True
    return not facts.uses(*WRAPPERS)


def wrap_edits(facts: Facts, made: cst.Call) -> tuple[Edit, ...]:
    """Return the edits that wrap the optimizer after its assignment, or in place."""
    script = facts.script
    assigned, hvd = script.assigned(made), script.alias
    if assigned is None:
        is_argument = isinstance(script.parents.get(made), cst.Arg)
        within = is_argument and Framework.TORCH not in script.frameworks
        whole = f"{hvd}.DistributedOptimizer({script.code(made)})"
        return (replace(script, made, whole),) if within else ()
    name = dotted(assigned)
    if not name:
        return ()
    model = model_of(made)
    names = f", named_parameters={model}.named_parameters()" if model else ""
    return insert_after(script, made, f"{name} = {hvd}.DistributedOptimizer({name}{names})")


def model_of(made: cst.Call) -> str:
    """Return "model" of `SGD(model.parameters(), ...)`, "" for anything else."""
    first = argument(made, "params", 0)
    alone = isinstance(first, cst.Call) and not first.args
    return dotted(receiver(first, "parameters")) if alone else ""


def check_unused(facts: Facts) -> Iterator[Finding]:
    """Find steps of an unwrapped optimizer whose wrapper has another name."""
    script = facts.script
    if Framework.TORCH not in script.frameworks:
        return
    made = set(constructors(facts))
    wrapped = {
        script.value(call.args[0].value): call
        for call in facts.calls("DistributedOptimizer")
        if call.args
    }
    for call in script.calls:
        optimizer = receiver(call, "step")
        stepped = script.value(optimizer) if optimizer is not None else None
        if optimizer is not None and stepped in made and stepped in wrapped:
            line = script.line(wrapped[stepped])
            name = script.code(optimizer)
            reason = f"{name} is the unwrapped optimizer; line {line} wraps it under another name"
            yield facts.finding("QH501", call, reason)


def check_named(facts: Facts) -> Iterator[Finding]:
    """Find `compile(optimizer="adam")`."""
    script = facts.script
    if Framework.KERAS not in script.frameworks or facts.uses(*WRAPPERS):
        return
    for call in script.calls:
        given = argument(call, "optimizer", 0) if facts.method(call) == "compile" else None
        if given is not None and isinstance(script.value(given), cst.SimpleString):
            reason = f"{script.code(given)} is an optimizer that does not average over the ranks"
            yield facts.finding("QH501", call, reason, absent=True)


def check_tape(facts: Facts) -> Iterator[Finding]:
    if facts.uses(*TAPES, *WRAPPERS) or averages_itself(facts):
        return
    script = facts.script
    tapes = [c for c, name in facts.called.items() if name.endswith("tensorflow.GradientTape")]
    for tape in tapes:
        taken = gradient_of(facts, tape)
        if taken is None:
            continue
        name = dotted(receiver(taken))
        line = f"{name} = {script.alias}.DistributedGradientTape({name})"
        edits = insert_before(script, taken, line) if name else ()
        reason = "it returns only the gradients of its own rank"
        yield facts.finding("QH502", tape, reason, edits=edits, absent=True)


def gradient_of(facts: Facts, tape: cst.Call) -> cst.Call | None:
    """Return the call of gradient() on a tape."""
    for call in facts.script.calls:
        owner = receiver(call, "gradient")
        if owner is not None and facts.script.value(owner) is tape:
            return call
    return None


def check_names(facts: Facts) -> Iterator[Finding]:
    """Find several optimizers whose gradients have the same names in Horovod."""
    script = facts.script
    # This package numbers them.
    horovod = any(each.module.startswith("horovod") for each in script.distributed)
    if Framework.TORCH not in script.frameworks or not horovod:
        return
    unnamed = [
        call
        for call in facts.calls("DistributedOptimizer")
        if ".keras." not in facts.called[call]
        and argument(call, "named_parameters", 1) is None
        and not any(each.star for each in call.args)
    ]
    for earlier, later in pairwise(unnamed):
        same = script.function(earlier) is script.function(later)
        if same and not script.exclusive(earlier, later):
            line = script.line(earlier)
            reason = f"Horovod names its gradients as those of the optimizer in line {line}"
            yield facts.finding("QH503", later, reason)


def check_clipping(facts: Facts) -> Iterator[Finding]:
    """Find gradients that are clipped after backward() has begun to average them."""
    if not facts.uses("DistributedOptimizer") or facts.uses("Adasum"):
        return
    waits = "synchronize", "unscale_"  # a loss scaler waits, too
    own = [call for call in facts.called if facts.method(call) in waits]
    if not own and facts.mentions(*waits):
        return
    script = facts.script
    for call, name in facts.called.items():
        # A call on the other side of a condition does not run before this one.
        if name.startswith("torch.nn.utils.clip_grad") and all(
            script.function(wait) is script.function(call) and script.exclusive(wait, call)
            for wait in own
        ):
            yield facts.finding("QH504", call, "each rank clips its own gradient, not the average")
