"""Step 1: functions of hvd that are not called: `hvd.rank == 0` is never true."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding

__all__ = ["check"]

VALUES = frozenset(
    f"{group}{name}{suffix}"
    for group, names in {
        "": ("rank", "size", "is_initialized", "is_homogeneous", "mpi_threads_supported"),
        "local_": ("rank", "size"),
        "cross_": ("rank", "size"),
        "mpi_": ("built", "enabled"),
        "gloo_": ("built", "enabled"),
    }.items()
    for name in names
    for suffix in ("", "_op")
) | {f"{library}_built" for library in ("ccl", "cuda", "ddl", "nccl", "rocm")}
OF_SETS = frozenset(
    f"{owner}.{name}"
    for owner in ("ProcessSet()", "add_process_set()", "global_process_set")
    for name in ("rank", "size", "included")
)
ACTIONS = frozenset(("init", "shutdown", "join", "barrier", "stop_timeline"))
# Functions whose arguments are numbers and texts; unknown functions may expect a function.
TAKERS = frozenset(
    (
        *("print", "str", "repr", "int", "float", "bool", "format", "range", "min", "max"),
        *("debug", "info", "warning", "error", "critical", "log"),
        *("seed", "manual_seed", "manual_seed_all", "set_seed", "set_random_seed", "default_rng"),
        *("set_device", "device", "tensor", "constant", "array", "arange", "full", "linspace"),
        *("shard", "take", "skip", "repeat", "batch", "DistributedSampler"),
        *("allreduce", "allgather", "broadcast", "allgather_object"),
    )
)
NUMBER = "is a function, but its value is needed"
NOTHING = "does nothing, because it is not called"
# Keyword arguments that are numbers in every function.
NUMBERS = frozenset(
    (
        *("num_replicas", "num_shards", "world_size", "num_ranks", "num_input_pipelines"),
        *("lr", "learning_rate", "initial_lr", "batch_size", "seed", "steps_per_epoch", "epochs"),
    )
)


def check(facts: Facts) -> Iterator[Finding]:
    """Yield functions of the API that are used as values or statements without being called."""
    script = facts.script
    for node in script.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)):
            continue
        reason = use(facts, node)
        name = script.api(node) if reason else ""
        if name in VALUES or name in OF_SETS or (reason == NOTHING and name in ACTIONS):
            end, code = script.end(node), script.code(node.with_changes(lpar=(), rpar=()))
            safe = reason != NOTHING or name == "init"
            edits = (Edit(end, end, "()"),) if safe and always(facts, node, name) else ()
            remedy = f"Call it: {code}()."
            yield facts.finding("QH103", node, f"{code} {reason}", edits=edits, remedy=remedy)


def always(facts: Facts, node: cst.Name | cst.Attribute, name: str) -> bool:
    """Return whether every assignment to a name assigns this function."""
    assigned = (b.value for b in facts.script.candidates(node) if b.how == "assign")
    return all(value is not None and facts.script.api(value) == name for value in assigned)


def use(facts: Facts, node: cst.CSTNode) -> str:
    """Return the fault of using a function instead of its value, "" if there is none.

    It is no fault to assign, return or pass a function, or to compare it by `is`.
    """
    parent = facts.script.parents.get(node)
    if isinstance(parent, (cst.Comparison, cst.ComparisonTarget)):
        return compared(facts, parent)
    if is_tested(parent, node):
        return "is a function, which is always true"
    if isinstance(parent, cst.Arg):
        return NUMBER if takes_numbers(facts, parent) else ""
    if isinstance(parent, cst.Expr):
        return NOTHING
    return NUMBER if is_operand(facts, parent, node) else ""


def compared(facts: Facts, parent: cst.Comparison | cst.ComparisonTarget) -> str:
    whole = parent if isinstance(parent, cst.Comparison) else facts.script.parents.get(parent)
    assert isinstance(whole, cst.Comparison)
    operators = [each.operator for each in whole.comparisons]
    if any(isinstance(each, (cst.Is, cst.IsNot)) for each in operators):
        return ""
    if all(isinstance(each, (cst.Equal, cst.In)) for each in operators):
        return f"is a function: {facts.script.code(whole)} is never true"
    if all(isinstance(each, (cst.NotEqual, cst.NotIn)) for each in operators):
        return f"is a function: {facts.script.code(whole)} is always true"
    return "is a function, which has no order"


def is_tested(parent: cst.CSTNode | None, node: cst.CSTNode) -> bool:
    """Return whether the truth value of a node is used."""
    if isinstance(parent, (cst.If, cst.While, cst.IfExp, cst.Assert, cst.CompIf)):
        return parent.test is node
    return isinstance(parent, cst.BooleanOperation) or (
        isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not)
    )


def is_operand(facts: Facts, parent: cst.CSTNode | None, node: cst.CSTNode) -> bool:
    """Return whether a node is an operand of arithmetic, formatting or indexing."""
    if isinstance(parent, cst.Element):  # "%d of %d" % (hvd.rank, hvd.size)
        row = facts.script.parents.get(parent)
        outer = facts.script.parents.get(row) if isinstance(row, cst.Tuple) else None
        return isinstance(outer, cst.BinaryOperation) and isinstance(outer.operator, cst.Modulo)
    if isinstance(parent, cst.IfExp):  # hvd.rank if distributed else 0
        other = parent.orelse if parent.body is node else parent.body
        return isinstance(other, cst.Integer)
    return isinstance(
        parent,
        (
            *(cst.BinaryOperation, cst.UnaryOperation, cst.AugAssign),
            *(cst.FormattedStringExpression, cst.Index, cst.Slice, cst.Match),
        ),
    )


def takes_numbers(facts: Facts, given: cst.Arg) -> bool:
    """Return whether an argument is a number or a text, by its keyword or the function called."""
    call = facts.script.parents.get(given)
    if not isinstance(call, cst.Call) or given.star:
        return False
    if given.keyword is not None and given.keyword.value in NUMBERS:
        return True
    if facts.script.definition(call) is not None:
        return False
    name = facts.method(call)
    return name in TAKERS or name.endswith("Sampler") or facts.called[call] in TAKERS
