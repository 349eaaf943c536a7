"""Files that one rank downloads or writes while the others wait for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert.loops import behind
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, find

__all__ = ["download_once", "wait_behind"]

LOADS = re.compile(r"^(keras|tensorflow\.keras)\.datasets\.\w+\.load_data$")


def downloads(script: Script, call: cst.Call) -> bool:
    """Return whether a call downloads data that do not exist yet."""
    given = find(call, "download")
    return bool(LOADS.match(script.called(call))) or (
        given is not None and dotted(given.value) == "True"
    )


def download_once(plan: Plan, wait: str) -> None:
    """Let one rank of each node download files before the other ranks use them.

    Args:
        plan: the plan to extend.
        wait: a call in which ranks wait for each other, as Python code.
    """
    script = plan.script
    statements: list[cst.BaseStatement] = []
    for call in sorted(script.calls, key=script.start):
        if downloads(script, call):
            statement = plan.anchor(call)
            if isinstance(statement, cst.SimpleStatementLine) and statement not in statements:
                statements.append(statement)
    while statements:
        first = last = statements.pop(0)
        body = script.block(first)
        while statements and statements[0] in body[script.position(last, body) + 1 :][:1]:
            last = statements.pop(0)
        plan.before(
            first,
            "# One rank of each node downloads; the others wait, and find the files there.",
            "if hvd.local_rank() != 0:",
            f"    {wait}",
        )
        plan.after(last, "if hvd.local_rank() == 0:", f"    {wait}")


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
    for call in reads:
        for each in dict.fromkeys(behind(plan.script, call, training)):
            plan.before(each, f"{wait}  # until rank 0 has written the file")
