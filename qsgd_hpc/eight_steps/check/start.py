"""Steps 1 and 2: init before anything else, and one GPU for each rank."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.edits import insert_after, insert_before
from qsgd_hpc.eight_steps.check.facts import COLLECTIVES, Event, Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, Severity
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
    in_helper = "init" in facts.helpers.names  # which may come first
    if inits and used[0] < inits[0] and not in_helper:
        called = facts.script.code(first.call.func)
        line = facts.script.line(facts.events[inits[0]].call)
        yield facts.finding("QH102", first.call, f"{called} is called before init (line {line})")


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
    if not facts.trains or facts.uses("local_rank") or any(pin in script.text for pin in PINS):
        return
    if facts.mentions("set_device", *PINS):
        return
    if Framework.TORCH in script.frameworks and (cuda := first_cuda(facts)) is not None:
        fixed = "cuda:" in script.code(cuda)
        edits = () if fixed else torch_edits(facts, cuda)
        reason = f"{script.code(cuda)} is the same GPU for all ranks of a node"
        yield facts.finding("QH201", cuda, reason, edits=edits, absent=True)
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


def first_cuda(facts: Facts) -> cst.CSTNode | None:
    """Return the first use of a GPU without a rank's number."""
    for node in facts.script.nodes:
        if isinstance(node, cst.Call):
            if facts.method(node) == "cuda" and not node.args:
                return node
            makes_device = facts.called[node] == "torch.device" and len(node.args) == 1
            moves = facts.method(node) == "to" and node.args
            if makes_device or moves:
                text = cuda_text(node.args[0].value)
                if text is not None:
                    return text
        elif isinstance(node, cst.Assign) and any(
            "device" in dotted(each.target).lower() for each in node.targets
        ):
            text = cuda_text(node.value)
            if text is not None:
                return text
    return None


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
