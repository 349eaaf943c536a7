"""Files that one rank downloads or writes while the others wait for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.check.saving import opens
from qsgd_hpc.eight_steps.convert.loops import behind
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.convert.rank0 import is_file
from qsgd_hpc.eight_steps.reading import DEPTH, Script, dotted, find, receiver

__all__ = ["download_once", "prepare_once", "wait_behind", "wait_for_models"]

LOADS = re.compile(
    r"^((tensorflow\.)?keras\.(datasets\.\w+\.load_data|utils\.get_file)|urllib\.request\.urlretrieve"
    r"|(wget|gdown)\.download|torch\.hub\.download_url_to_file|tensorflow_datasets\.load"
    r"|torchvision\.datasets\.utils\.download_\w+)$"
)


def downloads(script: Script, call: cst.Call) -> bool:
    """Return whether a call downloads data that do not exist yet."""
    given = find(call, "download")
    return bool(LOADS.match(script.called(call))) or (
        given is not None and dotted(given.value) == "True"
    )


def download_once(plan: Plan, trained: Sequence[cst.CSTNode], wait: str) -> None:
    """Let one rank of each node download files before the other ranks use them.

    Args:
        plan: the plan to extend.
        trained: the loops and calls that train.
        wait: a call in which ranks wait for each other, as Python code.
    """
    script = plan.script
    statements: list[cst.CSTNode] = []
    for call in sorted(script.calls, key=script.start):
        if downloads(script, call):
            # Ranks may not agree on whether a file is missing.
            looks = [place for place, looks in _places(script, call, trained) if looks]
            for statement in looks or [plan.anchor(call)]:
                simple = isinstance(statement, cst.SimpleStatementLine)
                if (simple or looks) and statement not in statements:
                    statements.append(statement)
    while statements:
        first = last = statements.pop(0)
        body = script.block(first)
        while statements and statements[0] in body[script.position(last, body) + 1 :][:1]:
            last = statements.pop(0)
        text = "# One rank of each node downloads; the others wait, and find the files there."
        _one_first(plan, first, last, "hvd.local_rank()", wait, text)


def _one_first(
    plan: Plan, first: cst.CSTNode, last: cst.CSTNode, number: str, wait: str, text: str
) -> None:
    """Let the ranks of another number than 0 run statements after the rank of number 0."""
    plan.before(first, text, f"if {number} != 0:", f"    {wait}")
    plan.after(last, f"if {number} == 0:", f"    {wait}")


def wait_behind(
    plan: Plan, reads: Sequence[cst.Call], training: Sequence[cst.CSTNode], wait: str
) -> None:
    """Let the ranks read a file behind the training only when rank 0 has written it.

    Args:
        plan: the plan to extend.
        reads: the calls that read a file.
        training: the loops and calls that train.
        wait: as for `download_once`.
    """
    places = (plan.anchor(each) for call in reads for each in behind(plan.script, call, training))
    for place in dict.fromkeys(places):
        plan.before(place, f"{wait}  # until rank 0 has written the file")


MODELS = re.compile(
    r"(^|\.)(load_model|load_weights|saved_model\.load|restore|restore_checkpoint|latest_checkpoint"
    r"|pickle\.load|tree_deserialise_leaves)$"
)


def wait_for_models(plan: Plan, trained: Sequence[cst.CSTNode], wait: str) -> None:
    """Let the ranks read a model behind the training only when rank 0 has written it."""
    script = plan.script
    found = (c for c in script.calls if MODELS.search(script.called(c)))
    wait_behind(plan, [c for c in found if script.definition(c) is None], trained, wait)


LOOKS = re.compile(r"exists|is_?(dir|file)|glob|listdir")
READS = re.compile(
    r"(^|\.)((load|read|from)_?\w*|open|imread|memmap|genfromtxt|File|\w*(Dataset|Folder|Processor))$"
)


def prepare_once(
    plan: Plan,
    guarded: Mapping[cst.CSTNode, cst.CSTNode],
    trained: Sequence[cst.CSTNode],
    wait: str,
) -> None:
    """Let the ranks read a file from before the training only when rank 0 has written it.

    Args:
        plan: the plan to extend.
        guarded: statements that only rank 0 runs, each with the last one under its condition.
        trained: the loops and calls that train.
        wait: as for `download_once`.
    """
    script = plan.script
    reads = (c for c in script.calls if READS.search(script.called(c)) and not opens(script, c))
    if all(any(behind(script, each, trained)) for each in reads):
        return
    places: dict[cst.CSTNode, bool] = {}
    for call in script.calls:
        if is_file(script, call) or opens(script, call):
            closed = _closed(script, call)
            for place, looks in _places(script, closed, trained) if closed is not None else ():
                last = guarded.get(place, place)
                places[last] = places.get(last, False) or (looks and place not in guarded)
    for place, looks in places.items():
        if looks and any(each in script.inside(place) for each in trained):
            continue  # ranks would wait in the training
        if looks:
            text = "# Rank 0 writes the files that are missing; the others wait, and find them."
            _one_first(plan, place, place, "hvd.rank()", wait, text)
        else:
            plan.after(place, f"{wait}  # until rank 0 has written the file")


def _closed(script: Script, call: cst.Call) -> cst.Call | None:
    """Return the call after which a file is complete, for `file = open(...)` that which closes it.

    None if the script does not close it.
    """
    name = script.target(call) if opens(script, call) else ""
    closes = (c for c in script.calls if name and dotted(receiver(c, "close")) == name)
    return next((c for c in closes if script.scope(c) is script.scope(call)), None) or (
        None if name else call
    )


def _places(
    script: Script, call: cst.CSTNode, trained: Sequence[cst.CSTNode], depth: int = DEPTH
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """Yield the statements that make a call before the training, and whether they look for files.

    Those that do are complete: the ranks may not agree on the branches in them. None for calls of
    which the text does not show that every rank makes them.
    """
    around = [script.statement(call), *script.ancestors(script.statement(call))]
    function = script.function(call)
    local = around[: around.index(function)] if function is not None else around[:-1]
    trains = [n for n in local if any(t in script.inside(n) for t in trained if t is not call)]
    if depth == 0 or around[0] in trains or any(behind(script, call, trained)):
        return
    if any(each in trained for each in local):
        return
    compound = (cst.For, cst.While, cst.With, cst.Try)
    outer: cst.CSTNode = around[0]
    looks = False
    for each in local:
        if each in trains:
            break
        searches = isinstance(each, cst.If) and _looks(script, each.test)
        looks |= searches or isinstance(each, cst.Try)
        if searches or isinstance(each, compound):
            outer = each
    if function is None:
        yield outer, looks
        return
    before = [n for n in function.body.body if script.start(n) < script.start(call)]
    returns = any(
        isinstance(n, cst.If | cst.Try)
        and _returns(script, n)
        and (isinstance(n, cst.Try) or _looks(script, n.test))
        for n in before
    ) or _returns(script, outer)
    made = [_places(script, each, trained, depth - 1) for each in script.calls_of(function)]
    callers = [list(each) for each in made]
    if not callers or not all(callers):
        return
    further = [place for several in callers for place in several]
    if returns:
        yield from ((place, True) for place, _ in further)
    elif any(looks for _, looks in further):
        yield from further
    else:
        yield outer, looks


def _looks(script: Script, test: cst.BaseExpression) -> bool:
    """Return whether a condition looks for files."""
    nodes = (n for n in script.inside(test) if isinstance(n, cst.Name | cst.Call))
    return any(LOOKS.search(script.code(script.value(n))) for n in nodes)


def _returns(script: Script, node: cst.CSTNode) -> bool:
    own = script.function(node)
    found = (n for n in script.inside(node) if isinstance(n, cst.Return))
    return any(script.function(n) is own for n in found)
