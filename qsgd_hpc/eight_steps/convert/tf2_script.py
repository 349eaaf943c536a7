"""Conversion of TensorFlow 2 scripts: a custom loop with GradientTape."""

from __future__ import annotations

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening, tf2_broadcast, tf_data
from qsgd_hpc.eight_steps.convert.arrays import shard_arrays
from qsgd_hpc.eight_steps.convert.calls import argument_node, name_of_module
from qsgd_hpc.eight_steps.convert.downloads import download_once
from qsgd_hpc.eight_steps.convert.keras_optimizer import is_optimizer, scale_optimizer
from qsgd_hpc.eight_steps.convert.keras_script import reseed
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, reaching, train_loops
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import LINEAR, is_number, scaled
from qsgd_hpc.eight_steps.convert.tf2_metrics import sum_metrics
from qsgd_hpc.eight_steps.convert.warmup import Steps, steps_of
from qsgd_hpc.errors import UsageError

__all__ = ["convert_tf2"]

MEAN = "gradient() returns the mean of all ranks' gradients."
RISE = "The rate rises from one rank's to that of all ranks over the first epoch."


def convert_tf2(plan: Plan) -> None:
    """Add the eight steps to a script with a custom loop."""
    script = plan.script
    gradients = [c for c in script.calls if script.called(c).endswith("GradientTape().gradient")]
    applies = [c for c in script.calls if script.called(c).endswith(".apply_gradients")]
    loops = train_loops(script, applies or gradients)
    if not gradients or not loops:
        raise UsageError(
            f"{script.path}: TensorFlow 2, but no training loop: looked for a call of "
            "tape.gradient() that a for or while repeats"
        )
    for loop in loops:
        _data(plan, loop)
    optimizers = [call for call in script.calls if is_optimizer(script, call)]
    steps = _steps(plan, loops)
    for call in optimizers:
        _rate(plan, call, steps)
    if not optimizers:
        plan.todo(loops[0].loop, "multiply the learning rate by hvd.size(), after a warm-up.")
    for call in gradients:
        assert isinstance(call.func, cst.Attribute)
        tape = script.code(call.func.value)
        plan.before(
            call, *plan.comment(5, MEAN, call), f"{tape} = hvd.DistributedGradientTape({tape})"
        )
        _not_in_xla(plan, call)
    for call in script.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "minimize":
            plan.todo(call, "average the gradients: use tape.gradient() and apply_gradients().")
    tf2_broadcast.broadcast(plan, loops, gradients, applies)
    for loop in loops:
        average_metrics(plan, loop)
    sum_metrics(plan, loops)
    _writers(plan)
    reseed(plan)
    opening.numpy_seeds(plan)
    download_once(plan, "hvd.barrier()")
    training = reaching(script, [*gradients, *applies, *optimizers])
    guard_outputs(plan, training, opening.import_line(script))
    more = [] if name_of_module(script, "tensorflow") else ["import tensorflow as tf"]
    pin = tf_data.pin_lines(script) if not more else PIN
    opening.open_script(plan, "qsgd_hpc.tensorflow", more, pin)


PIN = [
    'gpus = tf.config.list_physical_devices("GPU")',
    "if gpus:",
    '    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")',
]


def _data(plan: Plan, loop: TrainLoop) -> None:
    script = plan.script
    over = iterable(script, loop.loop)
    if over is not None and tf_data.is_dataset(script, over):
        tf_data.shard_dataset(plan, over, loop.loop)
        tf_data.takes(plan, over)
    elif not shard_arrays(plan, loop):
        if over is not None:
            tf_data.takes(plan, over)
        plan.todo(loop.loop, "shard the data: a rank's part of it, of equal size on all ranks.")


def _steps(plan: Plan, loops: tuple[TrainLoop, ...]) -> Steps:
    """Return the known number of steps of an epoch; a data set that repeats has none."""
    script = plan.script
    endless = any(script.called(call).endswith(".repeat") for call in script.calls)
    data = any(
        tf_data.is_dataset(script, over)
        for over in (iterable(script, loop.loop) for loop in loops)
        if over is not None
    )
    return steps_of(script, loops, (), loaded=data and not endless)


def _rate(plan: Plan, call: cst.Call, steps: Steps) -> None:
    """Warm up an optimizer's rate, unless the script changes it."""
    script = plan.script
    rate = argument_node(call, "learning_rate", 0)
    tf = name_of_module(script, "tensorflow")
    place, count = steps.at(plan, plan.anchor(call), later=False)
    sets = any(
        isinstance(n, cst.AssignTarget)
        and script.code(n.target).endswith((".learning_rate", ".lr"))
        for n in script.nodes
    ) or any(script.called(c).endswith("learning_rate.assign") for c in script.calls)
    if rate is None or not tf or place is None or sets or not is_number(script, rate):
        if scale_optimizer(plan, call):
            plan.todo(call, "raise the learning rate to this value over a warm-up.")
        return
    plan.before(call, *plan.comment(4, f"{LINEAR} {RISE}", call))
    schedule = f"{tf}.keras.optimizers.schedules.PolynomialDecay"
    plan.replace(rate, f"{schedule}({script.code(rate)}, {count}, {scaled(script, rate)})")


def _not_in_xla(plan: Plan, call: cst.Call) -> None:
    for function in plan.script.functions(call):
        for decorator in function.decorators:
            if "jit_compile" in plan.script.code(decorator):
                plan.todo(function, "XLA cannot wait for other ranks: leave out jit_compile.")


def _writers(plan: Plan) -> None:
    """Let only rank 0 write summaries."""
    script = plan.script
    for call in script.calls:
        if script.called(call) == "tensorflow.summary.create_file_writer":
            tf = script.code(call.func).rpartition(".create_file_writer")[0]
            text = "Otherwise every line would appear once per rank."
            plan.before(call, *plan.comment(7, text, call, once=True))
            plan.wrap(call, "", f" if hvd.rank() == 0 else {tf}.create_noop_writer()")
