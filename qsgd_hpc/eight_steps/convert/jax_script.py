"""Conversion of JAX scripts: loops that compute gradients, with or without optax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert import opening, tf_data, torch_data, words
from qsgd_hpc.eight_steps.convert.arrays import leave_data, point_out_parts, shard_arrays
from qsgd_hpc.eight_steps.convert.downloads import download_once, prepare_once, wait_for_models
from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, reaching, train_loops, training
from qsgd_hpc.eight_steps.convert.metrics import average_metrics
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import guard_outputs
from qsgd_hpc.eight_steps.convert.rates import Steps, is_number, scaled, steps_of
from qsgd_hpc.eight_steps.reading import Script, argument, dotted
from qsgd_hpc.errors import UsageError

__all__ = ["convert_jax"]

OPTIMIZERS = re.compile(
    r"^optax\.(adabelief|adadelta|adafactor|adagrad|adam|adamax|adamaxw|adamw|adan|amsgrad|fromage"
    r"|lamb|lars|lion|nadam|nadamw|noisy_sgd|novograd|radam|rmsprop|rprop|sgd|sm3|yogi)$"
)
UPDATES = re.compile(
    r"^optax\.\w+\(\)\.update$|\.apply_gradients$|^flax\.nnx\.Optimizer\(\)\.update$"
)
GRADIENTS = re.compile(r"^(jax|flax\.nnx)\.(value_and_)?grad$|^equinox\.filter_(value_and_)?grad$")
PLACES = re.compile(r"pmap$|device_put\w*$|[Ss]hard")  # arrays on several devices
# Functions that do not look for devices.
LAZY = re.compile(
    r"^jax\.((jit|vmap|pmap|grad|value_and_grad|checkpoint|remat|custom_[jv][jv]p)$|(config|tree)[._])"
)
COMPILES = ("jax.jit", "flax.nnx.jit", "equinox.filter_jit")


def convert_jax(plan: Plan) -> None:
    """Add the eight steps to a script that trains with JAX."""
    script = plan.script
    updates = [c for c in script.calls if UPDATES.search(script.called(c))]
    gradients = [c for c in script.calls if _takes_gradients(script, c)]
    loops = train_loops(script, updates or gradients)
    if not loops:
        raise UsageError(
            f"{script.path}: JAX, but no training loop: looked for jax.grad, jax.value_and_grad or "
            "the update of an optimizer of optax that a for or while repeats"
        )
    trained = training(script, loops)
    # First: a sampler needs what its loader downloads.
    download_once(plan, trained, "hvd.barrier()")
    loaders = torch_data.find_loaders(script, loops)
    torch_data.shard_loaders(plan, loaders)
    for loop in loops:
        over = iterable(script, loop.loop)
        if over is not None and tf_data.is_dataset(script, over):
            tf_data.shard_dataset(plan, over, loop.loop)
            tf_data.takes(plan, over)
        elif not loaders.train and not shard_arrays(plan, loop):
            leave_data(plan, loop)
    point_out_parts(plan, loops)
    torch_data.set_epochs(plan, loaders)
    made = _optimizers(script)
    names, unsized = loaders.names(script), loaders.unsized(script)
    steps = steps_of(script, loops, names, bool(loaders.train), unsized)
    for call in made:
        plan.step(5, words.MEAN, call)
        plan.wrap(call, "hvd.DistributedOptimizer(", ")")
        _rates(plan, call, steps)
    if not made:
        _without_optax(plan, gradients)
        plan.todo(loops[0].loop, words.SCALE_IT)
    _broadcast(plan, made, loops[0])
    for each in loaders.fed:
        average_metrics(plan, each.loop, each.tests, when=each.when)
    if opening.unlike_ranks(script):
        plan.todo(loops[0].loop, "fold hvd.rank() into the random key of dropout or noise.")
    opening.agree_on_random_numbers(plan)
    wait_for_models(plan, trained, "hvd.barrier()")
    guarded = guard_outputs(plan, reaching(script, [*updates, *gradients, *made]))
    prepare_once(plan, guarded, trained, "hvd.barrier()")
    _open(plan, torch_data.seeding(script) if loaders.all else [])


def _takes_gradients(script: Script, call: cst.Call) -> bool:
    """Return whether a call calls the result of jax.grad, jax.value_and_grad or the like."""
    called = script.called(call)
    if called.endswith("()") and GRADIENTS.match(called.removesuffix("()")):
        return True
    made = script.value(call.func)
    return (
        made is not call.func
        and script.called(made) in COMPILES
        and any(GRADIENTS.match(script.called(n)) for n in script.inside(made))
    )


def _optimizers(script: Script) -> list[cst.Call]:
    """Return the calls that make the optimizers whose init is called, also by flax."""
    begun = {script.called(c) for c in script.calls if script.called(c).endswith("().init")}
    found = []
    for call in script.calls:
        name = script.called(call)
        if name.startswith("optax.") and f"{name}().init" in begun and script.target(call):
            found.append(call)
    given_to = [(call, argument(call, "tx")) for call, _ in _states(script)]
    given_to += [(call, argument(call, "tx", 1)) for call in _nnx_optimizers(script)]
    for _, given in given_to:
        made = script.value(given) if given is not None else None
        if isinstance(made, cst.Call) and script.called(made).startswith("optax."):
            found.append(made)
    return list(dict.fromkeys(found))


def _rates(plan: Plan, call: cst.Call, steps: Steps) -> None:
    script = plan.script
    place, count = steps.at(plan, plan.anchor(call), later=False)
    optax = script.name_of("optax")
    inner = [c for c in script.calls_in(call) if OPTIMIZERS.match(script.called(c))]
    rates = [(n, argument(n, "learning_rate", 0)) for n in inner]
    for _, rate in rates:
        if rate is None or not is_number(script, rate):
            plan.todo(call, words.SCHEDULE)
        elif place is None or not optax:
            plan.step(4, words.LINEAR, call)
            plan.replace(rate, scaled(script, rate))
            plan.todo(call, words.RAISE_IT)
        else:
            plan.step(4, f"{words.LINEAR} {words.RISE}", call)
            text = f"{script.code(rate)}, {scaled(script, rate)}, {count}"
            plan.replace(rate, f"{optax}.linear_schedule({text})")
    if not rates:
        plan.todo(call, words.SCALE_IT)


def _without_optax(plan: Plan, gradients: Sequence[cst.Call]) -> None:
    """Average the gradients immediately after they are computed."""
    for call in gradients:
        target = plan.script.assigned(call)
        name = dotted(target.elements[-1].value if isinstance(target, cst.Tuple) else target)
        if name:
            lines = plan.comment(5, words.MEAN, call)
            plan.after(call, *lines, f"{name} = hvd.allreduce_gradients({name})")
        else:
            plan.todo(call, "average these gradients: hvd.allreduce_gradients(gradients).")


def _states(script: Script) -> Iterator[tuple[cst.Call, str]]:
    for call in script.calls:
        if script.called(call).endswith("TrainState.create"):
            yield call, script.target(call)


def _nnx_optimizers(script: Script) -> list[cst.Call]:
    return [c for c in script.calls if script.called(c) == "flax.nnx.Optimizer"]


def _broadcast(plan: Plan, made: Sequence[cst.Call], loop: TrainLoop) -> None:
    """Broadcast rank 0's parameters before they are passed to the optimizer."""
    script = plan.script
    broadcast = "{0} = hvd.broadcast_parameters({0}, root_rank=0)"
    done = False
    for call, name in _states(script):
        if name:
            plan.after(call, *plan.comment(6, words.ALIKE, call), broadcast.format(name))
        else:
            plan.step(6, words.ALIKE, call)
            plan.wrap(call, "hvd.broadcast_parameters(", ", root_rank=0)")
        done = True
    for call in _nnx_optimizers(script):
        model = argument(call, "model", 0)
        if dotted(model) and isinstance(call.func, cst.Attribute):
            name, nnx = dotted(model), script.code(call.func.value)
            line = f"{nnx}.update({name}, hvd.broadcast_parameters({nnx}.state({name})))"
            plan.step(6, words.ALIKE, call, line)
            done = True
    begun = {f"{script.called(call)}().init" for call in made}
    for call in script.calls:
        given = call.args[0].value if call.args else None
        if isinstance(given, cst.Call) and script.called(given) == "equinox.filter":
            given = argument(given, "pytree", 0)  # the model, whose arrays are selected
        name = dotted(given)
        if name and script.called(call) in begun:
            plan.step(6, words.ALIKE, call, broadcast.format(name))
            done = True
    if done:
        return
    outer, name = loop.epochs or loop.loop, _stepped(script, loop)
    if name and not any(PLACES.search(script.called(call)) for call in script.calls):
        plan.step(6, words.ALIKE, outer, broadcast.format(name))
    else:
        text = broadcast.format(name or "params")
        plan.todo(outer, f"{text} before the first step.")


def _stepped(script: Script, loop: TrainLoop) -> str:
    """Return the name of the parameters that a loop passes to its step and binds again, or ""."""
    outer = loop.epochs or loop.loop
    scope = script.scope(outer)
    for arg in loop.step.args:
        known = script.bindings.get((scope, dotted(arg.value)), ())
        before = any(b.how != "for" and script.end(b.at) <= script.start(outer) for b in known)
        if before and any(loop.loop in script.ancestors(b.at) for b in known):
            return dotted(arg.value)
    return ""


def _open(plan: Plan, seeding: Sequence[str]) -> None:
    script = plan.script
    for call in script.calls:
        name = script.called(call)
        if name.startswith("jax.") and not LAZY.match(name):
            plan.touch(call)  # the first such call finds JAX's devices
    more = opening.imports_of(script, "os", *(["torch"] if seeding else []))
    opening.open_script(plan, "qsgd_hpc.jax", more, [*opening.PIN_BY_ENVIRONMENT, *seeding])
