"""Conversion of TensorFlow 1 scripts: graphs, sessions and their hooks."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening, words
from qsgd_hpc.eight_steps.convert.arrays import point_out_parts, shard_arrays
from qsgd_hpc.eight_steps.convert.loops import (
    TrainLoop,
    last_with_call,
    reaching,
    sources,
    train_loops,
)
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import scale
from qsgd_hpc.eight_steps.reading import Script, argument, dotted, find, names_in, receiver
from qsgd_hpc.errors import UsageError

__all__ = ["convert_tf1"]

OPTIMIZER = re.compile(r"^tensorflow\.(compat\.v1\.)?train\.\w*Optimizer$")


def convert_tf1(plan: Plan) -> None:
    """Add the eight steps to a script of graphs and sessions."""
    script = plan.script
    optimizers = [c for c in script.calls if OPTIMIZER.match(script.called(c))]
    runs = _training_runs(script)
    loops = train_loops(script, runs)
    if not optimizers or not loops:
        raise UsageError(
            f"{script.path}: TensorFlow 1, but no training loop: looked for an optimizer of "
            "tf.train, and for a session that runs what its minimize() returned, in a loop"
        )
    for loop in loops:
        _data(plan, loop)
    point_out_parts(plan, loops)
    for call in optimizers:
        rate = argument(call, "learning_rate", 0)
        if rate is not None:
            scale(plan, rate)
            plan.step(4, words.LINEAR, call)
            plan.todo(call, words.RAISE_IT)
        else:
            plan.todo(call, words.SCALE_IT)
        plan.step(5, words.MEAN, call)
        plan.wrap(call, "hvd.DistributedOptimizer(", ")")
    pinned = _open_sessions(plan)
    for loop in loops:
        average_metrics(plan, loop, numbers=True)  # run() returns arrays of NumPy
    opening.agree_on_random_numbers(plan)
    guard_outputs(plan, reaching(script, [*runs, *optimizers]))
    pin = ["# Each session does so, by its config."] if pinned else ["# To do: see the sessions."]
    opening.open_script(plan, "qsgd_hpc.tensorflow", [], pin)


def _training_runs(script: Script) -> list[cst.Call]:
    """Return the calls of run() on the results of minimize() or apply_gradients()."""
    steps = {
        binding.name
        for binding in script.assignments
        if script.called(binding.value).endswith((".minimize", ".apply_gradients"))
    }
    return [
        call
        for call in script.calls
        if receiver(call, "run") and call.args and names_in(call.args[0].value) & steps
    ]


def _data(plan: Plan, loop: TrainLoop) -> None:
    script = plan.script
    if shard_arrays(plan, loop):
        return
    drawn = any(
        find(c, "last_step") for c in script.calls if script.called(c).endswith("StopAtStepHook")
    )
    text = "feed each rank its own samples, with the same number of steps on all ranks."
    plan.todo(loop.loop, text if drawn else f"shard the data: {text}")


SESSION = re.compile(r"^tensorflow\.(compat\.v1\.)?(Interactive)?Session$")
MONITORED = re.compile(r"^tensorflow\.(compat\.v1\.)?train\.MonitoredTrainingSession$")
INITIALISERS = ("global_variables_initializer", "initialize_all_variables")
RANK_0 = re.compile(
    r"\.train\.(LoggingTensorHook|CheckpointSaverHook|SummarySaverHook|StepCounterHook)$"
)


def _open_sessions(plan: Plan) -> bool:
    """Pin the GPU of every session and broadcast its initial state; False without sessions."""
    script = plan.script
    plain = [c for c in script.calls if SESSION.match(script.called(c))]
    monitored = [c for c in script.calls if MONITORED.match(script.called(c))]
    for call in (*plain, *monitored):
        _pin(plan, call)
    for call in monitored:
        _monitored(plan, call)
    for call in script.calls:
        if script.called(call).endswith(".StopAtStepHook"):
            last = argument(call, "last_step", 1) or argument(call, "num_steps", 0)
            if last is not None:
                plan.step(3, words.FEWER, call)
                plan.replace(last, f"{script.operand(last)} // hvd.size()")
    if plain:
        _initialised(plan)
    return bool(plain or monitored)


def _pin(plan: Plan, call: cst.Call) -> None:
    script = plan.script
    config = argument(call, "config", 2)
    text = "The ranks of a node each take their own."
    device = "config.gpu_options.visible_device_list = str(hvd.local_rank())"
    if config is None:
        prefix = (
            script.code(call.func).rpartition(".train.")[0]
            or script.code(call.func).rpartition(".")[0]
        )
        plan.step(2, text, call)
        plan.before(call, f"config = {prefix}.ConfigProto()", device)
        plan.add_argument(call, "config=config")
        return
    found = script.binding(config) if dotted(config) else None
    if found is None or found.how != "assign":
        plan.todo(call, "choose the GPU in this config: gpu_options.visible_device_list.")
        return
    plan.after(
        found.at, *plan.comment(2, text, found.at), device.replace("config", dotted(config), 1)
    )


def _monitored(plan: Plan, call: cst.Call) -> None:
    script = plan.script
    hook = "hvd.BroadcastGlobalVariablesHook(0)"
    hooks = argument(call, "hooks")
    known = sources(script, hooks)[0] if hooks is not None else None
    if hooks is None:
        plan.step(6, words.ALIKE, call)
        plan.add_argument(call, f"hooks=[{hook}]")
    elif isinstance(known, cst.List):
        plan.step(6, words.ALIKE, known)
        plan.insert(script.offset(script.start(known)) + 1, f"{hook}, " if known.elements else hook)
        for element in known.elements:
            if RANK_0.search(script.called(script.value(element.value))):
                plan.step(7, words.WRITTEN, known, once=True)
                plan.wrap(element.value, "*([", "] if hvd.rank() == 0 else [])")
    else:
        plan.step(6, words.ALIKE, call)
        plan.wrap(hooks, f"[{hook}, *", "]")
    folder = argument(call, "checkpoint_dir")
    if folder is not None:
        plan.step(7, words.WRITTEN, call, once=True)
        plan.replace(folder, f"{script.code(folder)} if hvd.rank() == 0 else None")


def _initialised(plan: Plan) -> None:
    """Broadcast after a session initialises its variables, or restores them."""
    script = plan.script
    found = False
    training = [c for c in script.calls if receiver(c, "run") and _is_repeated(script, c)]
    for call in script.calls:
        opened = receiver(call, "run")
        if opened is None or not call.args:
            continue
        if not script.called(script.value(call.args[0].value)).endswith(INITIALISERS):
            continue
        statement = last_with_call(script, plan.anchor(call), "Saver().restore", training)
        line = f"{script.code(opened)}.run(hvd.broadcast_global_variables(0))"
        plan.after(statement, *plan.comment(6, words.ALIKE, statement), line)
        found = True
    if not found:
        session = next(c for c in script.calls if SESSION.match(script.called(c)))
        plan.todo(session, "session.run(hvd.broadcast_global_variables(0)) when it has variables.")


def _is_repeated(script: Script, call: cst.Call) -> bool:
    return any(isinstance(each, cst.For | cst.While) for each in script.ancestors(call))
