"""Conversion of TensorFlow 1 scripts: graphs, sessions and their hooks."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening
from qsgd_hpc.eight_steps.convert.arrays import shard_arrays
from qsgd_hpc.eight_steps.convert.calls import argument_node, find, names_in
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, reaching, train_loops
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import LINEAR, scale
from qsgd_hpc.eight_steps.convert.tf1_session import open_sessions
from qsgd_hpc.eight_steps.reading import Script
from qsgd_hpc.errors import UsageError

__all__ = ["convert_tf1"]

OPTIMIZER = re.compile(r"^tensorflow\.(compat\.v1\.)?train\.\w*Optimizer$")
MEAN = "Each step uses the mean of all ranks' gradients."


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
    for call in optimizers:
        rate = argument_node(call, "learning_rate", 0)
        if rate is not None:
            scale(plan, rate)
            plan.before(call, *plan.comment(4, LINEAR, call))
            plan.todo(call, "raise the learning rate to this value over a warm-up.")
        else:
            plan.todo(call, "multiply the learning rate by hvd.size(), after a warm-up.")
        plan.before(call, *plan.comment(5, MEAN, call))
        plan.wrap(call, "hvd.DistributedOptimizer(", ")")
    pinned = open_sessions(plan)
    for loop in loops:
        average_metrics(plan, loop)
    opening.numpy_seeds(plan)
    guard_outputs(plan, reaching(script, [*runs, *optimizers]), opening.import_line(script))
    pin = ["# Each session does so, by its config."] if pinned else ["# To do: see the sessions."]
    opening.open_script(plan, "qsgd_hpc.tensorflow", [], pin)


def _training_runs(script: Script) -> list[cst.Call]:
    """Return the calls of run() on the results of minimize() or apply_gradients()."""
    steps = {
        binding.name
        for binding in script.assignments
        if isinstance(binding.value, cst.Call)
        and script.called(binding.value).endswith((".minimize", ".apply_gradients"))
    }
    return [
        call
        for call in script.calls
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value == "run"
        and call.args
        and names_in(call.args[0].value) & steps
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
