"""Step 8: losses and accuracies are averaged before they are reported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

import libcst as cst

from qsgd_hpc.eight_steps.check.broadcast import add_callback, callbacks_module, fit_of
from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Finding, Severity
from qsgd_hpc.eight_steps.reading import Binding, Framework, argument, dotted

__all__ = ["check"]

METRIC = re.compile(
    r"(^|_)(loss|losses|acc|accuracy|correct|metrics?|error|perplexity|f1|auc|iou|mae|rmse)(_|\d|$)",
    re.IGNORECASE,
)
AVERAGES = (
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce",
    "allgather", "allgather_object", "gather", "MetricAverageCallback", "reducescatter",
)  # fmt: skip
# Each rank has its own environment, also where no data is sharded.
REWARD = re.compile(r"reward", re.IGNORECASE)
CLOCK = re.compile(r"^(time\.(time|monotonic|perf_counter)|datetime\.datetime\.(utc)?now)$")
SHARDS = frozenset(("rank", "size", "ElasticSampler"))
# Keras's callbacks that make decisions from a metric, separately on each rank.
DECIDERS = ("ReduceLROnPlateau", "EarlyStopping", "ModelCheckpoint")


PLATEAU = re.compile(r"^torch\.optim\.lr_scheduler\.ReduceLROnPlateau\(\)\.step$")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of step 8."""
    if not facts.trains or facts.helpers.names & set(AVERAGES):
        return
    if Framework.KERAS in facts.script.frameworks:
        yield from check_fit(facts)
    averaged = averaged_in_place(facts)
    yield from check_prints(facts, averaged)
    yield from check_stops(facts)


def check_fit(facts: Facts) -> Iterator[Finding]:
    fit = fit_of(facts)
    module = callbacks_module(facts)
    if fit is None or facts.uses("MetricAverageCallback", "allreduce") or not module:
        return
    validates = any(argument(fit, n) is not None for n in ("validation_data", "validation_split"))
    decides = facts.mentions(*DECIDERS)
    if not validates and not decides:
        return
    what = "validation" if validates else "a callback"
    yield facts.finding(
        "QH801",
        fit,
        f"{what} sees the metrics of one rank",
        edits=add_callback(facts, f"{module}.MetricAverageCallback()"),
        remedy="Pass callbacks=[hvd.callbacks.MetricAverageCallback()].",
    )


def check_prints(facts: Facts, averaged: frozenset[Binding]) -> Iterator[Finding]:
    script = facts.script
    done: set[cst.Call] = set()
    inner, objects = innermost(facts), averaged_objects(facts)
    for place, event in enumerate(facts.events):
        call = event.call
        if facts.called[call] != "print" or call in done or place < facts.training[0]:
            continue
        names = metric_names(facts, call, averaged)
        if not names or not facts.guarded(event):
            continue
        found = facts.reach(*origins(facts, call))
        # A value that does not depend on a rank's shard needs no averaging.
        known = found.api & set(AVERAGES) or found.bindings & objects
        if known or not found.api & SHARDS:
            continue
        done.add(call)
        # Inside the innermost training loop it shows progress, not a result.
        progress = inner & set(event.loops(script))
        yield facts.finding(
            "QH801",
            call,
            f"{names[0]} is the value of rank 0 only",
            severity=Severity.NOTE if progress else None,
        )


def check_stops(facts: Facts) -> Iterator[Finding]:
    """Yield where ranks decide by a value of their own.

    They leave the training, or a step, for which the others wait, or change their learning rates.
    """
    script = facts.script
    # Those in a call itself: `loss`, not what an averaged sum of losses is made from.
    averaged = {
        script.binding(node)
        for call in facts.calls(*AVERAGES)
        for each in call.args
        for node in script.inside(each.value)
        if isinstance(node, cst.Name)
    } | averaged_objects(facts)
    sites = {site for i in facts.training for site in facts.events[i].sites()}
    training = {loop for site in sites for loop in script.loops(site)}
    # After the step of its round, `continue` skips none.
    last = {loop: site for site in script.nodes if site in sites for loop in script.loops(site)}
    for call in script.calls:
        metric = argument(call, "metrics", 0) if PLATEAU.match(facts.called[call]) else None
        if metric is not None and _is_own(facts, metric, averaged):
            reason = (
                f"{script.code(metric)} differs between ranks, so their learning rates will, too"
            )
            remedy = "Average it over the ranks first: hvd.allreduce(value)."
            yield facts.finding("QH802", call, reason, remedy=remedy)
    for node in script.nodes:
        if isinstance(node, cst.While) and node in training and _is_own(facts, node.test, averaged):
            code = script.code(node.test)
            reason = f"{code} differs between ranks, so some stop and the others wait for them"
            yield facts.finding("QH802", node.test, reason)
        if not isinstance(node, cst.Break | cst.Continue | cst.Return):
            continue
        loops = script.loops(node)
        left = loops if isinstance(node, cst.Return) else loops[:1]
        if isinstance(node, cst.Continue):
            left = tuple(
                each
                for each in left
                if each in last and script.start(last[each]) > script.start(node)
            )
        loop = next((each for each in left if each in training), None)
        if loop is None:
            continue
        for branch in script.branches(node):
            if loop not in script.ancestors(branch.node):
                break
            if _is_own(facts, branch.test, averaged):
                code = script.code(branch.test)
                what = "skip a step" if isinstance(node, cst.Continue) else "stop"
                reason = (
                    f"{code} differs between ranks, so some {what} and the others wait for them"
                )
                yield facts.finding("QH802", branch.test, reason)
                break


def _is_own(facts: Facts, test: cst.BaseExpression, averaged: Set[Binding | None]) -> bool:
    """Return whether a condition, or a value, may differ between ranks.

    By a metric of a shard, an environment, or a clock.
    """
    found = facts.reach(test)
    episode = any(facts.script.plays(call) for call in found.calls)
    rewards = {each for each in found.bindings if REWARD.search(each.name)}
    metrics = {each for each in found.bindings if METRIC.search(each.name)}
    known = found.api & set(AVERAGES) or averaged & (metrics | rewards)
    timed = any(CLOCK.search(facts.called.get(call, "")) for call in found.calls)
    own = timed or episode or rewards or (metrics and found.api & SHARDS)
    return bool(own and not known)


def innermost(facts: Facts) -> set[cst.CSTNode]:
    """Return the loops directly around training."""
    around = (facts.events[i].loops(facts.script) for i in facts.training)
    return {loops[0] for loops in around if loops}


def averaged_in_place(facts: Facts) -> frozenset[Binding]:
    """Return the bindings of averaged values: averages may be written back to them."""
    calls = facts.calls(*AVERAGES)
    return frozenset(b for c in calls for each in c.args for b in facts.reach(each.value).bindings)


def averaged_objects(facts: Facts) -> frozenset[Binding]:
    """Return the bindings of objects with an averaged attribute: `meter.sum = hvd.allreduce(...)`.

    Such a line may be in a loop: `for meter in (losses, accuracies)`.
    """
    script, found = facts.script, set[Binding | None]()
    for call in facts.calls(*AVERAGES):
        around = next((n for n in script.ancestors(call) if isinstance(n, cst.Assign)), None)
        for target in (each.target for each in around.targets) if around is not None else ():
            parts = target.elements if isinstance(target, cst.Tuple) else ()
            for part in [each.value for each in parts] or [target]:
                if not isinstance(part, cst.Attribute) or dotted(part.value) == "self":
                    continue
                bound = script.binding(part.value)
                found.add(bound)
                if bound is not None and bound.how == "for":
                    over = bound.value.elements if isinstance(bound.value, cst.Tuple) else ()
                    found |= {script.binding(each.value) for each in over}
    return frozenset(each for each in found if each is not None)


def metric_names(facts: Facts, call: cst.Call, averaged: frozenset[Binding]) -> list[str]:
    """Return the metrics' names in a print; none if one of them may be averaged already.

    That includes parameters of methods and of functions without a caller in the script.
    """
    script, found = facts.script, []
    for each in call.args:
        for node in script.inside(each.value):
            if not isinstance(node, cst.Name) or not METRIC.search(node.value):
                continue
            parent = script.parents.get(node)
            owner = parent if isinstance(parent, cst.Attribute) and parent.attr is node else node
            bound = script.binding(root(owner))
            unknown = bound is not None and bound.how == "parameter"
            if bound in averaged or (unknown and bound and not script.callers_of(bound)):
                return []
            found.append(node.value)
    return found


def origins(facts: Facts, call: cst.Call) -> list[cst.CSTNode]:
    """Return what a print's values are computed from.

    Without the parameters in `loss_of(params, data)`: all ranks have trained the same ones.
    """
    script, found = facts.script, list[cst.CSTNode]()
    trained = {facts.events[i].call for i in facts.training}
    for each in call.args:
        inner = [c for c in script.calls_in(each.value) if _is_metric_of(facts, c)]
        names = [n for n in script.inside(each.value) if isinstance(n, cst.Name)]
        known = {n for c in inner for n in script.inside(c)}
        others = [n for n in names if METRIC.search(n.value) and n not in known]
        given = [a.value for c in inner for a in c.args]
        parts = [value for value in given if not facts.reach(value).calls & trained]
        found += [*others, *parts] if inner else [each.value]
    return found


def _is_metric_of(facts: Facts, call: cst.Call) -> bool:
    """Return whether a call computes a metric of parameters and data, by a function of JAX."""
    return (
        Framework.JAX in facts.script.frameworks
        and isinstance(call.func, cst.Name)
        and bool(METRIC.search(call.func.value))
        and len(call.args) > 1
    )


def root(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the first name of a.b.c."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node
