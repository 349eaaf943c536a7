"""Conversion of PyTorch scripts: loops over loaders or over slices of tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.check.helpers import own_module
from qsgd_hpc.eight_steps.check.saving import is_temporary
from qsgd_hpc.eight_steps.convert import opening, torch_data, words
from qsgd_hpc.eight_steps.convert.arrays import leave_data, point_out_parts, shard_arrays
from qsgd_hpc.eight_steps.convert.downloads import download_once, prepare_once, wait_behind
from qsgd_hpc.eight_steps.convert.loops import (
    TrainLoop,
    reaching,
    sources,
    subscripted,
    train_loops,
    training,
)
from qsgd_hpc.eight_steps.convert.meters import sum_meters
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs, is_output
from qsgd_hpc.eight_steps.convert.rates import steps_of
from qsgd_hpc.eight_steps.convert.torch_data import Loaders
from qsgd_hpc.eight_steps.convert.torch_optimizer import (
    OPTIMIZER,
    distribute_optimizers,
    models,
    optimizers,
)
from qsgd_hpc.eight_steps.reading import (
    Script,
    argument,
    dotted,
    find,
    is_optimizer_name,
    receiver,
    source,
)
from qsgd_hpc.errors import UsageError

__all__ = ["convert_torch"]


def convert_torch(plan: Plan) -> None:
    """Add the eight steps to a PyTorch script."""
    script = plan.script
    steps = [c for c in script.calls if script.called(c).endswith(".backward")]
    loops = train_loops(script, steps)
    if not loops:
        raise UsageError(
            f"{script.path}: PyTorch, but no training loop: looked for a call of backward() that a "
            f"for or while repeats{_elsewhere(script) or _closure(script)}"
        )
    made = optimizers(script)
    trained = training(script, loops)
    # First: a sampler needs what its loader downloads.
    download_once(plan, trained, "hvd.barrier()")
    loaders = torch_data.find_loaders(script, loops)
    torch_data.shard_loaders(plan, loaders)
    for loop in loops:
        if not loaders.train and not shard_arrays(plan, loop):
            leave_data(plan, loop)
    point_out_parts(plan, loops)
    torch_data.set_epochs(plan, loaders)
    names, unsized = loaders.names(script), loaders.unsized(script)
    known = steps_of(script, loops, names, bool(loaders.train), unsized)
    distribute_optimizers(plan, loops, known)
    _count_steps(plan, loaders)
    _wait_for_files(plan, trained)
    others = _name_other_optimizers(plan)
    if not made:
        by_hand = any(isinstance(n, cst.Attribute) and n.attr.value == "grad" for n in script.nodes)
        text = "wrap the optimizer: hvd.DistributedOptimizer(optimizer)."
        if by_hand:
            text = "average each gradient before it is used: hvd.allreduce_(p.grad)."
        if by_hand or not others:
            plan.todo(loops[0].loop, text)
        plan.todo(loops[0].loop, "broadcast parameters and optimizer state before the first step.")
    for each in loaders.fed:
        meters, lines = sum_meters(plan, each.loop, loops, each.tests)
        average_metrics(plan, each.loop, each.tests, summed=meters, also=lines, when=each.when)
    _share_running_averages(plan, loops)
    _average_before_clipping(plan, others if made else None)
    _any_gpu(plan)
    opening.agree_on_random_numbers(plan)
    _point_out_noise(plan, loops)
    guarded = guard_outputs(plan, reaching(script, (*steps, *made)))
    prepare_once(plan, guarded, trained, "hvd.barrier()")
    _open(plan)


def _elsewhere(script: Script) -> str:
    """Return which modules next to a script have the training loop, and what to do, or ""."""
    folder = script.path.resolve().parent
    found = (own_module(folder, each.module) for each in script.imports)
    files = {f for f in found if f is not None and b".backward(" in source(f)}
    names = ", ".join(sorted(os.path.relpath(f, folder) for f in files))
    return f". Convert {names}, and let only rank 0 print and save here" if names else ""


def _closure(script: Script) -> str:
    """Return what to do about an optimizer that repeats its step itself, or ""."""
    if not any(receiver(c, "step") and c.args for c in script.calls):
        return ""
    return (
        ". optimizer.step(closure) repeats it itself: put the step into a loop, such as "
        "for _ in range(1): optimizer.step(closure)"
    )


def _point_out_noise(plan: Plan, loops: Sequence[TrainLoop]) -> None:
    """Leave noise of the training to the author: a test may draw it, too, on which ranks agree."""
    script = plan.script
    if opening.unlike_ranks(script):
        return  # each rank has a seed of its own
    bodies = {each.loop for each in loops}
    used = {f for body in bodies for c in script.calls_in(body) if (f := script.definition(c))}
    drawn = [c for c in script.calls if NOISE.match(script.called(c))]
    # First those of the loops and of what they call; a class may be called by its name only.
    drawn.sort(key=lambda c: not (bodies & {*script.ancestors(c)} or script.function(c) in used))
    for call in drawn:
        function = script.function(call)
        method = function is not None and script.class_of(call) and function.name.value[:2] != "__"
        if method or function in used or bodies & {*script.ancestors(call)}:
            text = "all ranks draw the same numbers here: seed each rank differently if only the "
            plan.todo(call, f"{text}training draws them: torch.manual_seed(seed + hvd.rank()).")
            return


def _wait_for_files(plan: Plan, trained: Sequence[cst.CSTNode]) -> None:
    """Let the ranks load a file behind the training only when rank 0 has written it."""
    script = plan.script
    if not any(script.called(call) == "torch.save" for call in script.calls):
        return
    own = any(is_output(script, c) for c in script.calls if script.called(c) == "torch.save")
    for call in script.calls:
        if own and script.called(call).startswith("tempfile."):
            plan.todo(call, "each rank has another temporary folder; rank 0 writes to its own.")
    loads = [call for call in script.calls if script.called(call) == "torch.load"]
    shared = [call for call in loads if not is_temporary(script, *call.args)]
    wait_behind(plan, shared, trained, "hvd.barrier()")


def _open(plan: Plan) -> None:
    script = plan.script
    torch = script.name_of("torch") or "torch"
    pin = [
        f"if {torch}.cuda.is_available():",
        f"    {torch}.cuda.set_device(hvd.local_rank() % {torch}.cuda.device_count())",
        *torch_data.seeding(script),
    ]
    opening.open_script(plan, "qsgd_hpc.torch", opening.imports_of(script, "torch"), pin)


NOISE = re.compile(r"^torch\.(randn|rand|normal)(_like)?$")
CLIPS = re.compile(r"^torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm|value)_?$")
NORMS = re.compile(r"BatchNorm|torchvision\.models|resnet\d|track_running_stats")


def _steps(script: Script) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return the calls of an optimizer's step, each with the optimizer."""
    made = [(c, receiver(c, "step"), script.called(c)) for c in script.calls if not c.args]
    return [
        (call, optimizer)
        for call, optimizer, name in made
        if optimizer is not None
        and (OPTIMIZER.match(name.removesuffix("().step")) or is_optimizer_name(optimizer))
    ]


def _name_other_optimizers(plan: Plan) -> set[cst.CSTNode]:
    """Leave optimizers from outside of torch.optim to the author; returns what makes them."""
    script = plan.script
    found: set[cst.CSTNode] = set()
    wrapped = {f.name.value for made in optimizers(script) for f in script.functions(made)}
    for call in script.calls:
        stepped = receiver(call, "step")
        if stepped is None:
            continue
        for node in (stepped, *(arg.value for arg in call.args)):  # also a scaler's
            made = script.value(node)
            if not is_optimizer_name(node) or not isinstance(made, cst.Call):
                continue
            own = script.definition(made)  # of a function: what it returns is wrapped there
            name = script.called(made)
            method = name.rpartition(".")[2]  # of a model whose class is unknown
            if not OPTIMIZER.match(name) and (
                method not in wrapped if own is None else own.name.value == "__init__"
            ):
                plan.todo(made, "wrap this optimizer, multiply its rate by hvd.size(), warm it up.")
                found.add(made)
    return found


def _average_before_clipping(plan: Plan, others: set[cst.CSTNode] | None) -> None:
    """Wait for the mean of all ranks' gradients before they are clipped.

    Args:
        plan: the plan to extend.
        others: what makes the optimizers that the author has to wrap; None: all of them.
    """
    script = plan.script
    prepared: set[cst.CSTNode] = set()
    for clip in [call for call in script.calls if CLIPS.match(script.called(call))]:
        if _is_unscaled(script, clip):
            continue  # unscale_() waits for the averages
        found = _step_after(script, clip)
        statement = plan.anchor(found[0]) if found is not None else None
        first = _beside(script, clip, statement)
        left = found is not None and (others is None or script.value(found[1]) in others)
        if found is None or first is None or statement is None or left:
            plan.todo(clip, words.CLIP_IT)
        elif statement not in prepared:
            prepared.add(statement)
            optimizer = script.code(found[1])
            text = "Wait for the mean of all ranks' gradients, so that all ranks clip equally."
            plan.step(5, text, first, f"{optimizer}.synchronize()")
            plan.under([statement], f"with {optimizer}.skip_synchronize():")


def _is_unscaled(script: Script, clip: cst.Call) -> bool:
    """Return whether a loss scaler's `unscale_` always runs before a call, in its function."""
    unscales = (call for call in script.calls if script.called(call).endswith(".unscale_"))
    return any(script.precedes(call, clip) for call in unscales)


def _step_after(script: Script, clip: cst.Call) -> tuple[cst.Call, cst.BaseExpression] | None:
    """Return the first step of an optimizer after a call, in the same function and loop."""
    loops = script.loops(clip)
    for step, optimizer in _steps(script):
        if (
            script.start(step) > script.start(clip)
            and (not loops or loops[0] in script.ancestors(step))
            and script.function(step) is script.function(clip)
        ):
            return step, optimizer
    return None


def _beside(
    script: Script, clip: cst.Call, step: cst.BaseStatement | None
) -> cst.BaseStatement | None:
    """Return the statement with a call in the block of a step, so that both run equally often.

    None: it is in another block, it contains the backward pass, or the step shares its line.
    """
    if not isinstance(step, cst.SimpleStatementLine) or len(step.body) > 1:
        return None
    body = script.block(step)
    index = script.position(clip, body)
    found = body[index] if index >= 0 else None
    if not isinstance(found, cst.BaseStatement) or found is step:
        return None
    backward = (c for c in script.calls_in(found) if script.called(c).endswith(".backward"))
    return None if any(backward) else found


def _share_running_averages(plan: Plan, loops: Sequence[TrainLoop]) -> None:
    """Broadcast rank 0's running averages of batch normalisation after each epoch."""
    script = plan.script
    if not any(
        NORMS.search(script.qualified(c.func)) or NORMS.search(dotted(c.func)) for c in script.calls
    ):
        return
    names, made = _normalised(script)
    for loop in loops:
        used = (n for n in script.inside(loop.loop) if isinstance(n, cst.Name | cst.Attribute))
        own = (n for n in used if dotted(n) in names or made & {*sources(script, n)})
        found = list(dict.fromkeys(dotted(n) for n in own))
        if not found:
            plan.todo(loop.loop, "broadcast the buffers of batch normalisation after each epoch.")
            continue
        text = "Batch normalisation has seen a rank's own samples; test with rank 0's averages."
        plan.after(
            loop.loop,
            *plan.comment(6, text, loop.loop),
            *(
                f"hvd.broadcast_parameters(dict({model}.named_buffers()), root_rank=0)"
                for model in found
            ),
        )


def _normalised(script: Script) -> tuple[set[str], set[cst.CSTNode]]:
    """Return the models of the optimizers, and those that they train a part of.

    Returns:
        Their names, and what makes them: a loop's function may have a model as its parameter.
    """
    names: set[str] = set()
    made: set[cst.CSTNode] = set()
    for call in optimizers(script):
        given, own = find(call, "params", 0), {*models(script, call)[0]}
        own |= {name.rpartition(".")[0] for name in own} - {"", "self"}
        nodes = script.inside(script.value(given.value)) if given is not None else ()
        used = (n for n in nodes if isinstance(n, cst.Name | cst.Attribute) and dotted(n) in own)
        made |= {s for n in used for s in sources(script, n) if isinstance(s, cst.Call)}
        names |= own
    return names, made


# The number of steps of a schedule: the argument's name and position.
COUNTED: Mapping[str, tuple[str, int]] = {
    "CosineAnnealingLR": ("T_max", 1),
    "CosineAnnealingWarmRestarts": ("T_0", 1),
    "LinearLR": ("total_iters", 3),
    "OneCycleLR": ("total_steps", 2),
    "PolynomialLR": ("total_iters", 1),
    "StepLR": ("step_size", 1),
}
WARMED_UP = re.compile(r"^get_\w*schedule_with_warmup$")


def _count_steps(plan: Plan, loaders: Loaders) -> None:
    """Add a TODO to schedules that count batches, of which each rank has only its part."""
    script = plan.script
    own = {f"len({name})" for name in (*loaders.names(script), *plan.arrays)}
    for call in script.calls:
        short = script.called(call).rpartition(".")[2]
        warms_up = WARMED_UP.match(short)
        name, index = ("num_training_steps", 2) if warms_up else COUNTED.get(short, ("", 0))
        count = argument(call, name, index) if name else None
        if count is None or not _steps_with_batches(plan, loaders, script.target(call)):
            continue
        if not any(text in _spelled_out(script, count) for text in own):
            named = f"num_warmup_steps and {name}" if warms_up else name
            plan.todo(call, f"a rank makes hvd.size() times fewer steps: divide {named} too.")


def _steps_with_batches(plan: Plan, loaders: Loaders, schedule: str) -> bool:
    """Return whether a schedule makes its steps in a loop over a rank's part of the data."""
    script = plan.script
    steps = [c for c in script.calls if script.code(c.func) == f"{schedule}.step" != ".step"]
    return any(
        each.loop.loop in script.ancestors(step)
        for step in steps
        for each in loaders.fed
        if {*each.calls} & {*loaders.train} or {*subscripted(script, each.loop.loop)} & plan.arrays
    )


def _spelled_out(script: Script, node: cst.BaseExpression, depth: int = 4) -> str:
    """Return the text of an expression, and of the values of the names in it."""
    made = [script.value(n) for n in script.inside(node) if isinstance(n, cst.Name)]
    further = [each for each in made if isinstance(each, cst.BaseExpression)] if depth else []
    inner = (_spelled_out(script, e, depth - 1) for e in further if not isinstance(e, cst.Name))
    return " ".join((script.code(node), *inner))


def _any_gpu(plan: Plan) -> None:
    """Replace "cuda:0" by the rank's own GPU; add a TODO for other fixed choices of GPUs."""
    script = plan.script
    text = "each rank has its own GPU: leave out the number."
    for node in script.nodes:
        if isinstance(node, cst.SimpleString) and node.raw_value == "cuda:0":
            plan.replace(node, f"{node.quote}cuda{node.quote}")
        elif _is_numbered(script, node):
            plan.todo(node, text)
    for call in script.calls:
        name = script.called(call)
        if name.endswith(".DataParallel"):
            plan.todo(call, "take the model out of DataParallel: each rank has one GPU.")
        elif (
            name == "torch.cuda.set_device"
            or (name.endswith(".cuda") and find(call, "device", 0) is not None)
            or (name == "torch.device" and find(call, "index", 1) is not None)
        ):
            plan.todo(call, text)


def _is_numbered(script: Script, node: cst.CSTNode) -> bool:
    """Return whether an expression is the name of a GPU with its number, which may be a variable.

    Such as "cuda:1", "cuda:%d", "cuda:{}", "cuda:" + gpu and f"cuda:{gpu}".
    """
    if isinstance(node, cst.SimpleString):
        begins = isinstance(script.parents.get(node), cst.BinaryOperation)
        number = r"cuda:(\d+|%[ds]|\{\w*\})" + ("?" if begins else "")
        return re.fullmatch(number, str(node.raw_value)) is not None
    first = node.parts[0] if isinstance(node, cst.FormattedString) and node.parts else None
    return isinstance(first, cst.FormattedStringText) and first.value == "cuda:"
