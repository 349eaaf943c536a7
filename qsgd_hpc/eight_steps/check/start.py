"""Steps 1 and 2: init before anything else, functions that are called, a GPU for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import COLLECTIVES, Event, Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, Severity, insert_after, insert_before
from qsgd_hpc.eight_steps.reading import Framework, dotted

__all__ = ["check"]

AFTER_INIT = COLLECTIVES | {
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("DistributedOptimizer", "join"),
}
PINS = (
    "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCALID", "set_visible_devices", "visible_device_list",
    "local_device_ids",
)  # fmt: skip


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of steps 1 and 2."""
    yield from check_init(facts)
    yield from check_called(facts)
    yield from check_pin(facts)


def check_init(facts: Facts) -> Iterator[Finding]:
    used = facts.places(*AFTER_INIT)
    if not used:
        return
    first = facts.events[used[0]]
    if not facts.uses("init"):
        if facts.trains or first.call in facts.calls("rank", "size", *COLLECTIVES):
            init = f"{facts.script.alias}.init()"
            edits = insert_before(facts.script, place_of_init(facts, first), init)
            reason = f"{facts.script.code(first.call.func)} is called, but init never is"
            yield facts.finding("QH101", first.call, reason, edits=edits, absent=True)
        return
    inits = facts.places("init")
    # The trace has a lambda's calls where it is defined; it may be called later.
    used = tuple(i for i in used if not _in_lambda(facts, facts.events[i]))
    in_helper = "init" in facts.helpers.names  # which may come first
    if inits and used and used[0] < inits[0] and not in_helper:
        first = facts.events[used[0]]
        called = facts.script.code(first.call.func)
        line = facts.script.line(facts.events[inits[0]].call)
        yield facts.finding("QH102", first.call, f"{called} is called before init (line {line})")


def _in_lambda(facts: Facts, event: Event) -> bool:
    around = (node for site in event.sites() for node in facts.script.ancestors(site))
    return any(isinstance(node, cst.Lambda) for node in around)


def place_of_init(facts: Facts, first: Event) -> cst.CSTNode:
    """Return the statement to insert init before: the first one of a function such as main().

    That is before the model moves to a GPU, which must be chosen after init.
    """
    script = facts.script
    outer = first.through[0] if first.through else first.call
    if first.through and isinstance(only(script.statement(outer)), cst.Expr):
        function = script.definition(outer)
        body = function.body.body if function is not None else ()
        for line in body:
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
            if not (isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)):
                return line
    node = script.statement(outer)
    for parent in script.ancestors(node):
        if parent is script.module or (
            isinstance(script.entry, cst.If) and parent is script.entry.body
        ):
            break
        if isinstance(parent, cst.BaseStatement):
            node = parent
    return node


def only(statement: cst.BaseStatement) -> cst.CSTNode | None:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def check_pin(facts: Facts) -> Iterator[Finding]:
    script = facts.script
    if not facts.trains or any(pin in script.text for pin in PINS) or facts.mentions(*PINS):
        return
    pins = facts.uses("local_rank") or facts.mentions("set_device")
    used = (c for c in cudas(facts) if not pins or is_fixed(facts, c))
    if Framework.TORCH in script.frameworks and (cuda := next(used, None)) is not None:
        edits = () if "cuda:" in script.code(cuda) else torch_edits(facts, cuda)
        reason = f"{script.code(cuda)} is the same GPU for all ranks of a node"
        yield facts.finding("QH201", cuda, reason, edits=edits, absent=not pins)
    elif pins:
        return
    elif script.frameworks & {Framework.TF1, Framework.TF2, Framework.KERAS}:
        inits = facts.calls("init")
        if not inits or not any(i.module == "tensorflow" for i in script.imports):
            return
        yield facts.finding(
            "QH201",
            inits[0],
            "TensorFlow takes every GPU it sees, on each rank",
            severity=Severity.WARNING,
            edits=tensorflow_edits(facts),
            remedy='Use tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU").',
            absent=True,
        )


def cudas(facts: Facts) -> Iterator[cst.CSTNode]:
    """Yield the uses of a GPU without a rank's number."""
    for node in facts.script.nodes:
        text: cst.CSTNode | None = None
        if isinstance(node, cst.Call):
            if facts.method(node) == "cuda" and not node.args:
                yield node
            makes_device = facts.called[node] == "torch.device" and len(node.args) == 1
            moves = facts.method(node) == "to" and node.args
            if makes_device or moves:
                text = cuda_text(node.args[0].value)
        elif isinstance(node, cst.Assign) and any(
            "device" in dotted(each.target).lower() for each in node.targets
        ):
            text = cuda_text(node.value)
        if text is not None:
            yield text


def is_fixed(facts: Facts, cuda: cst.CSTNode) -> bool:
    """Return whether all ranks certainly use a GPU that has a number, such as "cuda:0"."""
    script = facts.script
    if not re.search(r"cuda:\d", script.code(cuda)):
        return False
    if any("cuda" not in script.code(branch.test) for branch in script.branches(cuda)):
        return False
    assigned = next((b for b in script.assignments if b.at in script.ancestors(cuda)), None)
    return assigned is None or len(script.bound(assigned.name, cuda)) == 1


def cuda_text(node: cst.BaseExpression) -> cst.CSTNode | None:
    """Return the string "cuda" or "cuda:0" in an expression, also in a conditional one."""
    if isinstance(node, cst.SimpleString):
        return node if node.value.strip("\"'").startswith("cuda") else None
    if isinstance(node, cst.IfExp):
        return cuda_text(node.body) or cuda_text(node.orelse)
    return None


def torch_edits(facts: Facts, cuda: cst.CSTNode) -> tuple[Edit, ...]:
    """Return the edits that choose the GPU after init, if init precedes its first use."""
    script, inits = facts.script, facts.calls("init")
    late = bool(inits) and script.start(inits[0]) > script.start(cuda)
    if late and script.function(cuda) in (None, script.function(inits[0])):
        return ()
    if not inits or not any(
        i.module == "torch" and i.alias == "torch" for i in facts.script.imports
    ):
        return ()
    hvd = facts.script.alias
    indent = facts.script.module.default_indent
    return insert_after(
        facts.script,
        inits[0],
        "if torch.cuda.is_available():",
        f"{indent}torch.cuda.set_device({hvd}.local_rank())",
    )


def tensorflow_edits(facts: Facts) -> tuple[Edit, ...]:
    inits = facts.calls("init")
    named = [i.alias for i in facts.script.imports if i.module == "tensorflow" and i.alias]
    if not named or Framework.TF1 in facts.script.frameworks:
        return ()
    tf, hvd, indent = named[0], facts.script.alias, facts.script.module.default_indent
    return insert_after(
        facts.script,
        inits[0],
        f'gpus = {tf}.config.list_physical_devices("GPU")',
        "if gpus:",
        f'{indent}{tf}.config.set_visible_devices(gpus[{hvd}.local_rank() % len(gpus)], "GPU")',
    )


# Functions whose values scripts need: `hvd.rank == 0` is never true.
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


def check_called(facts: Facts) -> Iterator[Finding]:
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
