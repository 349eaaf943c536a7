"""Steps 4 to 6 for PyTorch: the rate, the optimizer, and the same initial state on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import libcst as cst

from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.loops import (
    TrainLoop,
    iterable,
    last_with_call,
    origins,
    sources,
    training,
)
from qsgd_hpc.eight_steps.convert.opening import unlike_ranks
from qsgd_hpc.eight_steps.convert.plan import WIDTH, Plan
from qsgd_hpc.eight_steps.convert.rates import Steps, scale
from qsgd_hpc.eight_steps.reading import (
    Branch,
    Script,
    argument,
    dotted,
    find,
    has_own_rate,
    is_optimizer_name,
    is_scheduler,
    names_in,
    receiver,
)

__all__ = ["distribute_optimizers", "optimizers"]

OPTIMIZER = re.compile(r"^torch\.optim\.([a-z]\w*\.)*[A-Z]\w*$")

# Default rates of the optimizers.
RATES: Mapping[str, str] = {
    "ASGD": "1e-2", "Adadelta": "1.0", "Adafactor": "1e-2", "Adagrad": "1e-2", "Adam": "1e-3",
    "AdamW": "1e-3", "Adamax": "2e-3", "LBFGS": "1", "Muon": "1e-3", "NAdam": "2e-3",
    "RAdam": "1e-3", "RMSprop": "1e-2", "Rprop": "1e-2", "SGD": "1e-3", "SparseAdam": "1e-3",
}  # fmt: skip


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


def grouped(plan: Plan) -> list[Made]:
    """Return the optimizers; those made in the branches of one `if` count as one."""
    script = plan.script
    found: list[Made] = []
    for call in optimizers(script):
        target = script.target(call)
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


def models(script: Script, call: cst.Call) -> tuple[list[str], str]:
    """Return the models of an optimizer, and named_parameters= if it has exactly those of one."""
    given = find(call, "params", 0)
    if given is None:
        return [], ""
    expression = script.value(given.value)
    names: list[str] = []
    listed = dotted(given.value)
    appends = (c for c in script.calls if listed and dotted(receiver(c, "append")) == listed)
    loops = (each for call in appends for each in script.loops(call))
    origins = (each.iter for each in loops if isinstance(each, cst.For))
    for node in (n for each in (expression, *origins) for n in script.inside(each)):
        names.append(dotted(receiver(node, "parameters", "named_parameters")))
    names = list(dict.fromkeys(n for n in names if n))
    code = script.code(expression)
    code = code.removeprefix("list(").removesuffix(")") if code.startswith("list(") else code
    whole = len(names) == 1 and code == f"{names[0]}.parameters()"
    return names, f", named_parameters={names[0]}.named_parameters()" if whole else ""


def _whole_models(script: Script, calls: Sequence[cst.Call]) -> list[str]:
    """Return the models of an optimizer, if it has all of their parameters and no others."""
    given = find(calls[0], "params", 0)
    names, _ = models(script, calls[0])
    if given is None or len(calls) > 1:
        return []
    tops = {name.partition(".")[0] for name in names}
    known = {*names, *tops, *(f"{name}.parameters" for name in names)}
    known |= {name.rpartition(".")[0] for name in names}
    read = names_in(script.value(given.value))
    return names if read <= known | {"itertools", "itertools.chain", "chain", "list"} else []


def distribute_optimizers(plan: Plan, loops: Sequence[TrainLoop], steps: Steps) -> None:
    """Scale the rates, wrap the optimizers, and broadcast their and the models' initial state."""
    script = plan.script
    trained = training(script, loops)
    found = grouped(plan)
    owned = {each.target: _whole_models(script, each.calls) for each in found if each.target}
    calls = {each.target: each.calls[0] for each in found}
    in_turns = turns(script, owned, calls) if len(owned) == len(found) > 1 else ()
    separate(plan, in_turns, owned)
    for each in found:
        scaled = [call for call in each.calls if not has_own_rate(script.called(call))]
        for call in scaled:
            _scale(plan, call)
        if not each.target:
            _wrap_in_place(plan, each.calls[0], _passes(plan, loops, each))
            continue
        names, named = models(script, each.calls[0])
        passes = _in_turn(in_turns, each) if in_turns else _passes(plan, loops, each)
        given = f"{each.target}{named}{passes}"
        wrap = [f"{each.target} = hvd.DistributedOptimizer({given})"]
        if len(wrap[0]) + len(script.indentation(each.statement)) > WIDTH:
            wrap = [f"{each.target} = hvd.DistributedOptimizer(", f"    {given}", ")"]
        plan.after(each.statement, *plan.comment(5, words.MEAN, each.statement), *wrap)
        if scaled:
            warm_up(plan, each.target, each.statement, steps, len(found) == 1)
        _broadcast(plan, each, names, trained)
    _draw_unlike(plan, found, trained)
    if len(found) > 1 and not in_turns and not _one_by_one(script, found):
        plan.todo(
            found[0].statement,
            "several optimizers: check that each wraps its own parameters, and that a loss reaches "
            "those of one optimizer only (requires_grad_(False) excludes the others).",
        )


def _one_by_one(script: Script, found: Sequence[Made]) -> bool:
    """Return whether the same step serves all optimizers, of which its function has one."""
    used = [stepped(call) for call in script.calls if _is_step(script, call)]
    served = {source for node in used[:1] for source in sources(script, node)}
    return len(used) == 1 and all(call in served for each in found for call in each.calls)


def _rates(script: Script, call: cst.Call) -> Iterator[cst.BaseExpression]:
    """Yield the learning rates in a call of an optimizer, including those of parameter groups."""
    rate = argument(call, "lr", 1)
    if rate is not None:
        yield rate
    for group in _groups(script, call):
        for node in script.inside(group):
            if isinstance(node, cst.Call) and script.called(node) == "dict":
                rate = argument(node, "lr")
                if rate is not None:
                    yield rate
            if (
                isinstance(node, cst.DictElement)
                and isinstance(node.key, cst.SimpleString)
                and node.key.raw_value == "lr"
            ):
                yield node.value


def _groups(script: Script, call: cst.Call) -> list[cst.CSTNode]:
    """Return what an optimizer's parameters are made from, also if a variable has them."""
    given = argument(call, "params", 0)
    made: list[cst.CSTNode] = [*origins(script, given)] if given is not None else []
    for node in script.nodes:
        owner = receiver(node, "append", "extend", "insert")
        added = [arg.value for arg in node.args] if isinstance(node, cst.Call) else []
        if isinstance(node, cst.AugAssign):
            owner, added = node.target, [node.value]
        if owner is not None and any(each in made for each in origins(script, owner)):
            made += [each for value in added for each in origins(script, value)]
    listed = (e for each in made if isinstance(each, cst.List | cst.Tuple) for e in each.elements)
    return [*made, *(s for e in listed if dotted(e.value) for s in origins(script, e.value))]


def _scale(plan: Plan, call: cst.Call) -> None:
    script = plan.script
    done = {(edit.start, edit.end) for edit in plan.edits}  # for another optimizer
    for rate in dict.fromkeys(_rates(script, call)):
        if script.span(rate) not in done:
            scale(plan, rate)
    if find(call, "lr", 1) is None:
        default = RATES.get(script.called(call).rpartition(".")[2])
        if default is None:
            plan.todo(call, "multiply the learning rate by hvd.size().")
            return
        plan.add_argument(call, f"lr={default} * hvd.size()")
    plan.step(4, words.LINEAR, call, once=True)


def _wrap_in_place(plan: Plan, call: cst.Call, passes: str) -> None:
    names, named = models(plan.script, call)
    plan.wrap(call, "hvd.DistributedOptimizer(", f"{named}{passes})")
    plan.step(5, words.MEAN, call, once=True)
    if names:
        lines = [f"hvd.broadcast_parameters({n}.state_dict(), root_rank=0)" for n in names]
        plan.step(6, words.ALIKE, call, *lines, once=True)
    else:
        plan.todo(call, "broadcast the model's parameters from rank 0 before the first step.")
    if not _is_set_again(plan):
        plan.todo(call, "raise the learning rate to this over a warm-up.")


def _in_turn(found: Sequence[Turn], each: Made) -> str:
    """Return the argument for the backward passes in an optimizer's turn, "" for a single one."""
    count = sum(each.target in turn.steps for turn in found)
    return f", backward_passes_per_step={count}" if count > 1 else ""


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
        inner = [c for c in steps if loop.loop in script.ancestors(c)]
        outer = [c for c in steps if loop.epochs is not None and loop.epochs in script.ancestors(c)]
        if backward and outer and not inner:  # a loop over parts of a batch
            count = iterable(script, loop.loop)
            if isinstance(count, cst.Call) and script.called(count) == "range":
                node = count.args[0].value
                if len(count.args) == 1 and _is_known(plan, node, each):
                    return f", backward_passes_per_step={script.code(node)}"
        if len(backward) > len(inner) and (inner or outer):
            plan.todo(loop.loop, "several backward() per step: pass backward_passes_per_step=.")
    own = [call for call in steps if dotted(stepped(call)) == each.target]
    for call in own or steps:
        for branch in script.branches(call):
            if _has_passes(script, branch):
                break
            for node in script.inside(branch.test):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    plan.todo(
                        call, "make the batches of an epoch divisible by the passes per step."
                    )
                    text = script.code(node.right)
                    if not _is_known(plan, node.right, each):
                        text = "1"
                        plan.todo(each.statement, "pass the number of backward passes per step.")
                    return f", backward_passes_per_step={text}"
    return ""


def _has_passes(script: Script, branch: Branch) -> bool:
    """Return whether backward passes are in the taken branch only, so that a step follows each."""
    calls = [c for c in script.calls_in(branch.node) if script.called(c).endswith(".backward")]
    taken = {b.taken for c in calls for b in script.branches(c) if b.node is branch.node}
    return taken == {branch.taken}


def _is_known(plan: Plan, node: cst.BaseExpression, each: Made) -> bool:
    """Return whether an expression has its value where an optimizer is made."""
    names = frozenset(n for n in names_in(node) if "." not in n)
    steps = Steps(((plan.script.code(node), names),))
    return steps.at(plan, each.statement, later=False)[0] is not None


def _is_step(script: Script, call: cst.Call) -> bool:
    """Return whether a call is the step of an optimizer, or of a loss scaler with one."""
    name = script.called(call)
    if not name.endswith(".step"):
        return False
    if not isinstance(call.func, cst.Attribute) and not call.args:  # of step = optimizer.step
        return bool(OPTIMIZER.match(name.removesuffix(".step").removesuffix("()")))
    node = stepped(call)
    made = script.qualified(node).removesuffix("()")
    # One that a function or a method of the script returns is known by its name only.
    return bool(OPTIMIZER.match(made)) or is_optimizer_name(node)


def _broadcast(
    plan: Plan, each: Made, names: Sequence[str], trained: Sequence[cst.CSTNode]
) -> None:
    script = plan.script
    place = last_with_call(script, each.statement, ".load_state_dict", trained)
    lines = plan.comment(6, words.ALIKE, place)
    lines += [f"hvd.broadcast_parameters({name}.state_dict(), root_rank=0)" for name in names]
    lines.append(f"hvd.broadcast_optimizer_state({each.target}, root_rank=0)")
    plan.after(place, *lines)
    if not names:
        plan.todo(place, "broadcast the model's parameters from rank 0 before the first step.")


def _draw_unlike(plan: Plan, found: Sequence[Made], trained: Sequence[cst.CSTNode]) -> None:
    """Let each rank draw its own dropout and noise from the training on."""
    script = plan.script
    if not unlike_ranks(script):
        return
    torch = script.name_of("torch") or "torch"
    noise = [
        "# From here on each rank draws other random numbers, for dropout and noise.",
        "if hvd.rank() > 0:",
        f"    {torch}.manual_seed({torch}.initial_seed() + hvd.rank())",
    ]
    places: dict[cst.CSTNode, bool] = {}
    for each in found:
        if each.target:
            place = last_with_call(script, each.statement, ".load_state_dict", trained)
            body = script.block(place)
            positions = (script.position(node, body) for node in trained)
            later = [at for at in positions if at > script.position(place, body)]
            # What all ranks must draw alike, such as a split, may stand before the training.
            places[body[min(later)] if later else place] = bool(later)
    for place, trains in places.items():
        if trains:
            plan.before(place, *noise)
        else:
            plan.after(place, *noise)


# Schedulers that set the rate to their own values and would undo a warm-up.
OWN_RATES = {
    "ChainedScheduler", "ConstantLR", "CosineAnnealingWarmRestarts", "CyclicLR", "LambdaLR",
    "LinearLR", "MultiplicativeLR", "OneCycleLR", "SequentialLR",
}  # fmt: skip


def warm_up(
    plan: Plan, target: str, statement: cst.BaseStatement, steps: Steps, alone: bool
) -> None:
    """Warm up the rate of an optimizer, unless the script sets it.

    Args:
        plan: the plan to extend.
        target: the optimizer's name.
        statement: the warm-up is inserted after this and after the lines that wrap the optimizer.
        steps: steps of an epoch.
        alone: whether it is the only optimizer.
    """
    script = plan.script
    called = {
        script.called(c).rpartition(".")[2] for c in script.calls if is_scheduler(script.called(c))
    }
    own = sorted(called & OWN_RATES)
    if own == ["OneCycleLR"]:
        for call in script.calls:
            if script.called(call).endswith(".OneCycleLR"):
                rate = find(call, "max_lr", 1)
                if rate is not None:
                    scale(plan, rate.value)
                    plan.step(4, f"{words.LINEAR} This warms up by itself.", call)
        return
    if _is_set_again(plan):
        return
    by_hand = _set_by_hand(script)
    if "CyclicLR" in own:
        plan.todo(statement, "CyclicLR sets its own rates: multiply them by hvd.size() too.")
        return
    if own or by_hand:
        why = own[0] if own else "the script"
        plan.todo(statement, f"{why} sets the learning rate: raise it to this over a warm-up.")
        return
    if any(_restores(script, call, target) for call in script.calls):
        plan.todo(
            statement,
            "a checkpoint sets the learning rate, so no warm-up is added: add one for a new "
            "training, and change the rate if the number of ranks has changed.",
        )
        return
    text = "Large steps at the beginning would diverge, so the rate rises over the first epoch."
    place, count = steps.at(plan, statement)
    if place is None:
        plan.todo(statement, "choose over how many steps the learning rate warms up.")
        place, count = statement, "100"
    torch = script.name_of("torch") or "torch"
    name = "warm_up" if alone else f"{target.replace('.', '_')}_warm_up"
    plan.after(
        place,
        *plan.comment(4, text, place),
        f"{name} = {torch}.optim.lr_scheduler.LinearLR(",
        f"    {target}, start_factor=1 / hvd.size(), total_iters={count}",
        ")",
        f"{target}.register_step_post_hook(lambda *_: {name}.step())",
    )


def _set_by_hand(script: Script) -> list[cst.SimpleString]:
    """Return the keys of `group["lr"] = ...`."""
    strings = [n for n in script.nodes if isinstance(n, cst.SimpleString)]
    return [n for n in strings if n.raw_value == "lr" and _is_set(script, n)]


def _is_set_again(plan: Plan) -> bool:
    """Leave rates that the script sets anew, whatever they were before, to the author."""
    found = [key for key in _set_by_hand(plan.script) if _is_forgotten(plan.script, key)]
    for key in found:
        plan.todo(
            key,
            "this sets the learning rate again: multiply it by hvd.size() too, with a warm-up.",
        )
    return bool(found)


def _restores(script: Script, call: cst.Call, target: str) -> bool:
    """Return whether a call may load the state of an optimizer, which has its learning rate."""
    owner = receiver(call, "load_state_dict")
    if owner is None:
        return False
    bound = script.binding(owner)
    return (
        dotted(owner) == target
        or is_optimizer_name(owner)
        or (bound is not None and bound.how == "for")
    )


def _is_set(script: Script, node: cst.SimpleString) -> bool:
    """Return whether a string is the key of `group["lr"] = ...`."""
    for parent in script.ancestors(node):
        if isinstance(parent, cst.AssignTarget | cst.AugAssign):
            target = parent.target
            return isinstance(target, cst.Subscript) and any(
                n is node for n in script.inside(target)
            )
        if isinstance(parent, cst.BaseStatement):
            return False
    return False


def _is_forgotten(script: Script, key: cst.SimpleString) -> bool:
    """Return whether the value assigned to `group["lr"]` does not depend on the previous rate."""
    statement = next(n for n in script.ancestors(key) if isinstance(n, cst.Assign | cst.AugAssign))
    if isinstance(statement, cst.AugAssign):
        return False
    return re.search(r"""["'](initial_)?lr["']""", script.code(statement.value)) is None


OWN = "This loss gives gradients only to the models whose optimizer steps next."


@dataclass(frozen=True, eq=False)
class Turn:
    """One backward pass of optimizers that train in turns.

    Attributes:
        backward: its call.
        steps: the optimizers that step next, by name.
    """

    backward: cst.Call
    steps: frozenset[str]


def stepped(call: cst.Call) -> cst.BaseExpression:
    """Return the optimizer of its own step, or of a loss scaler's; a function if it has no name."""
    if call.args:
        return call.args[0].value
    return call.func.value if isinstance(call.func, cst.Attribute) else call.func


def turns(
    script: Script, owned: Mapping[str, Sequence[str]], calls: Mapping[str, cst.Call]
) -> tuple[Turn, ...]:
    """Return the backward passes, if each can be limited to its own models without any effect.

    Else, as in a GAN, a generator's loss also gives gradients to the discriminator. A serial script
    discards them; several ranks would average them, too. They can be limited if every optimizer's
    gradients are zeroed before its turn, in the same loop.

    Args:
        script: the script.
        owned: the models of each optimizer, by its name.
        calls: the call that makes it.
    Returns:
        Empty if that is not certain, or if all optimizers step together.
    """
    backward = [call for call in script.calls if script.called(call).endswith(".backward")]
    steps = [c for c in script.calls if receiver(c, "step") and dotted(stepped(c)) in owned]
    events = sorted((*backward, *steps), key=script.start)
    places = {(script.function(each), script.loops(each)[:1]) for each in events}
    if len(places) != 1 or {dotted(stepped(each)) for each in steps} != {*owned}:
        return ()
    if any(script.exclusive(one, other) for one in events for other in events):
        return ()
    pairs = [(name, calls[each]) for each, names in owned.items() for name in names]
    if not all(owned.values()) or not _is_disjoint([name for name, _ in pairs]):
        return ()
    if not all(_is_visible(script, name, call, events[0]) for name, call in pairs):
        return ()
    found = tuple(Turn(each, _next_steps(events, steps, each)) for each in backward)
    alike = all(turn.steps == {*owned} for turn in found)
    if alike or not all(turn.steps and find(turn.backward, "inputs") is None for turn in found):
        return ()
    return found if all(_is_fresh(script, found, owned, step) for step in steps) else ()


def separate(plan: Plan, found: Sequence[Turn], owned: Mapping[str, Sequence[str]]) -> None:
    """Let each backward pass give gradients to its own models only."""
    for turn in found:
        names = list(
            dict.fromkeys(name for each in owned if each in turn.steps for name in owned[each])
        )
        origin = f"p in {names[0]}.parameters()"
        if len(names) > 1:
            origin = f"model in ({', '.join(names)}) for p in model.parameters()"
        plan.step(5, OWN, turn.backward, once=True)
        plan.add_argument(turn.backward, f"inputs=[p for {origin} if p.requires_grad]")


def _is_disjoint(names: Sequence[str]) -> bool:
    """Return whether no model is named twice, or part of another one."""
    return not any(f"{one}.".startswith(f"{other}.") for one, other in permutations(names, 2))


def _is_visible(script: Script, name: str, made: cst.Call, at: cst.Call) -> bool:
    """Return whether a model of an optimizer has the same name at another call."""
    root = name.partition(".")[0]
    function = script.function(at)
    if root == "self":
        return script.class_of(made) is script.class_of(at)
    if function is None or function is script.function(made):
        return function is script.function(made)
    return script.function(made) is None and (function, root) not in script.bindings


def _next_steps(
    events: Sequence[cst.Call], steps: Sequence[cst.Call], backward: cst.Call
) -> frozenset[str]:
    """Return the optimizers that step after a backward pass and before any further pass."""
    found: set[str] = set()
    for each in events[events.index(backward) + 1 :]:
        if each in steps:
            found.add(dotted(stepped(each)))
        elif found:
            break
    return frozenset(found)


def _is_fresh(
    script: Script, found: Sequence[Turn], owned: Mapping[str, Sequence[str]], step: cst.Call
) -> bool:
    """Return whether an optimizer's gradients are zeroed between others' passes and its step."""
    name = dotted(stepped(step))
    others = [turn.backward for turn in found if name not in turn.steps]
    whole = {name, *(owned[name] if len(owned[name]) == 1 else ())}
    return any(
        dotted(receiver(call, "zero_grad")) in whole
        and script.precedes(call, step)
        and script.loops(call)[:1] == script.loops(step)[:1]
        and not any(script.start(call) < script.start(b) < script.start(step) for b in others)
        for call in script.calls
    )
