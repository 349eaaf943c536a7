"""Steps 4 to 6 for PyTorch: the rate, the optimizer, and the same initial state on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import (
    body_of,
    find,
    inside,
    names_in,
    position_of,
    short_name,
    target_of,
    walk,
)  # fmt: skip
from qsgd_hpc.eight_steps.convert.loops import TrainLoop
from qsgd_hpc.eight_steps.convert.opening import unlike_ranks
from qsgd_hpc.eight_steps.convert.plan import WIDTH, Plan
from qsgd_hpc.eight_steps.convert.rates import LINEAR, TORCH_RATES, scale, torch_rates
from qsgd_hpc.eight_steps.convert.torch_warmup import is_scheduler, warm_up
from qsgd_hpc.eight_steps.convert.warmup import Steps
from qsgd_hpc.eight_steps.reading import Script, dotted

__all__ = ["distribute_optimizers", "optimizers"]

OPTIMIZER = re.compile(r"^torch\.optim\.([a-z]\w*\.)*[A-Z]\w*$")


@dataclass(frozen=True, eq=False)
class Made:
    """An optimizer: its name, the calls that may make it, and the statement that makes it."""

    target: str
    calls: tuple[cst.Call, ...]
    statement: cst.BaseStatement


def optimizers(script: Script) -> tuple[cst.Call, ...]:
    """Return the calls that make an optimizer of torch.optim."""
    names = ((call, script.called(call)) for call in script.calls)
    return tuple(call for call, name in names if OPTIMIZER.match(name) and not is_scheduler(name))


def made(plan: Plan) -> list[Made]:
    """Return the optimizers; those made in the branches of one `if` count as one."""
    script = plan.script
    found: list[Made] = []
    for call in optimizers(script):
        target = target_of(script, call)
        branches = [b.node for b in script.branches(call) if isinstance(b.node, cst.If)]
        for i, other in enumerate(found):
            shared = [b for b in script.branches(other.calls[0]) if b.node in branches]
            if target and other.target == target and shared:
                outermost = shared[-1].node
                found[i] = Made(target, (*other.calls, call), plan.anchor(outermost))
                break
        else:
            found.append(Made(target, (call,), plan.anchor(call)))
    return found


def models(script: Script, call: cst.Call) -> tuple[list[str], bool]:
    """Return the models of an optimizer, and whether it has exactly the parameters of one."""
    given = find(call, "params", 0)
    if given is None:
        return [], False
    expression = script.value(given.value)
    names: list[str] = []
    for node in walk(expression):
        func = node.func if isinstance(node, cst.Call) else None
        if isinstance(func, cst.Attribute) and func.attr.value in (
            "parameters",
            "named_parameters",
        ):
            names.append(dotted(func.value))
    names = list(dict.fromkeys(n for n in names if n))
    whole = isinstance(expression, cst.Call) and len(names) == 1
    return names, whole and script.code(expression) == f"{names[0]}.parameters()"


def distribute_optimizers(plan: Plan, loops: Sequence[TrainLoop], steps: Steps) -> None:
    """Scale the rates, wrap the optimizers, and broadcast their and the models' initial state."""
    script = plan.script
    found = made(plan)
    for each in found:
        for call in each.calls:
            _scale(plan, call)
        if not each.target:
            _wrap_in_place(plan, each.calls[0])
            continue
        names, whole = models(script, each.calls[0])
        named = f", named_parameters={names[0]}.named_parameters()" if whole else ""
        passes = _passes(plan, loops, each)
        given = f"{each.target}{named}{passes}"
        wrap = [f"{each.target} = hvd.DistributedOptimizer({given})"]
        if len(wrap[0]) + len(plan.indentation(each.statement)) > WIDTH:
            wrap = [f"{each.target} = hvd.DistributedOptimizer(", f"    {given}", ")"]
        text = "Each step uses the mean of all ranks' gradients."
        plan.after(each.statement, *plan.comment(5, text, each.statement), *wrap)
        warm_up(plan, each.target, each.statement, steps, len(found) == 1)
        _broadcast(plan, each, names)
    if len(found) > 1:
        plan.todo(
            found[0].statement,
            "several optimizers: check that each wraps its own parameters, and that a loss reaches "
            "those of one optimizer only (requires_grad_(False) excludes the others).",
        )


def _scale(plan: Plan, call: cst.Call) -> None:
    script = plan.script
    rates = list(torch_rates(call))
    for rate in rates:
        scale(plan, rate)
    if find(call, "lr", 1) is None:
        default = TORCH_RATES.get(short_name(script, call))
        if default is None:
            plan.todo(call, "multiply the learning rate by hvd.size().")
            return
        plan.add_argument(call, f"lr={default} * hvd.size()")
    plan.before(call, *plan.comment(4, LINEAR, call, once=True))


def _wrap_in_place(plan: Plan, call: cst.Call) -> None:
    names, whole = models(plan.script, call)
    named = f", named_parameters={names[0]}.named_parameters()" if whole else ""
    plan.wrap(call, "hvd.DistributedOptimizer(", f"{named})")
    mean = "Each step uses the mean of all ranks' gradients."
    plan.before(call, *plan.comment(5, mean, call, once=True))
    if names:
        alike = "Every rank starts with rank 0's values."
        plan.before(call, *plan.comment(6, alike, call, once=True))
        plan.before(
            call, *[f"hvd.broadcast_parameters({n}.state_dict(), root_rank=0)" for n in names]
        )
    else:
        plan.todo(call, "broadcast the model's parameters from rank 0 before the first step.")
    plan.todo(call, "raise the learning rate to this over a warm-up.")


def _passes(plan: Plan, loops: Sequence[TrainLoop], each: Made) -> str:
    """Return the argument for gradients that are accumulated over several batches, or ""."""
    script = plan.script
    steps = [call for call in script.calls if _is_step(script, call)]
    for loop in loops:
        backward: list[cst.Call] = []
        for c in script.calls_in(loop.loop):
            either = any(script.exclusive(c, other) for other in backward)
            if script.called(c).endswith(".backward") and not either:
                backward.append(c)
        if len(backward) > len([c for c in steps if inside(script, c, loop.loop)]) > 0:
            plan.todo(loop.loop, "several backward() per step: pass backward_passes_per_step=.")
    for call in steps:
        for branch in script.branches(call):
            for node in walk(branch.test):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    plan.todo(call, "an epoch's batches must be a multiple of the passes per step.")
                    text = script.code(node.right)
                    names = frozenset(n for n in names_in(node.right) if "." not in n)
                    if Steps(((text, names),)).at(plan, each.statement, later=False)[0] is None:
                        text = "1"
                        plan.todo(each.statement, "pass the number of backward passes per step.")
                    return f", backward_passes_per_step={text}"
    return ""


def _is_step(script: Script, call: cst.Call) -> bool:
    """Return whether a call is the step of an optimizer, or of a loss scaler with one."""
    name = script.called(call)
    if not name.endswith(".step"):
        return False
    given = script.qualified(call.args[0].value) if call.args else name[: -len(".step")]
    return bool(OPTIMIZER.match(given.removesuffix("()")))


def _broadcast(plan: Plan, each: Made, names: Sequence[str]) -> None:
    script = plan.script
    place = each.statement
    body = body_of(script, place)
    for call in script.calls:
        if script.called(call).endswith(".load_state_dict"):
            index = position_of(script, call, body)
            if index > position_of(script, place, body):
                statement = body[index]
                if isinstance(statement, cst.BaseStatement) and not isinstance(
                    statement, cst.For | cst.While
                ):
                    place = statement
    lines = plan.comment(6, "Every rank starts with rank 0's values.", place)
    lines += [f"hvd.broadcast_parameters({name}.state_dict(), root_rank=0)" for name in names]
    lines.append(f"hvd.broadcast_optimizer_state({each.target}, root_rank=0)")
    if unlike_ranks(script):
        lines += [
            "# From here on each rank draws other random numbers, for dropout and noise.",
            "if hvd.rank() > 0:",
            "    torch.manual_seed(torch.initial_seed() + hvd.rank())",
        ]
    plan.after(place, *lines)
    if not names:
        plan.todo(place, "broadcast the model's parameters from rank 0 before the first step.")
