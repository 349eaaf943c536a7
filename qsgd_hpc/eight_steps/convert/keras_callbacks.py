"""The callbacks of Keras's fit: three new ones on every rank, and some on rank 0 only."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert.calls import argument_node
from qsgd_hpc.eight_steps.convert.loops import sources
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted

__all__ = ["add_callbacks"]

WRITERS = re.compile(
    r"\.callbacks\.(ModelCheckpoint|CSVLogger|TensorBoard|BackupAndRestore|RemoteMonitor"
    r"|SwapEMAWeights)$|^(wandb|mlflow|tqdm)\."
)
TEXTS = (
    (6, "The broadcast callback gives every rank rank 0's variables before the first batch."),
    (8, "The average callback replaces a rank's metrics by those of all ranks."),
    (4, "The warm-up callback raises the rate to that of all ranks over the first epoch."),
)


def writes(script: Script, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a callback that writes files."""
    made = script.value(node)
    return isinstance(made, cst.Call) and bool(WRITERS.search(script.called(made)))


def add_callbacks(plan: Plan, fit: cst.Call, warm_up: str) -> None:
    """Add the callbacks of this package to a call of fit, before the script's own callbacks.

    Args:
        plan: the plan to extend.
        fit: the call.
        warm_up: the callback that warms up the rate, as Python code, or "".
    """
    ours = [
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
        "hvd.callbacks.MetricAverageCallback()",
        *([warm_up] if warm_up else []),
    ]
    given = argument_node(fit, "callbacks", 5)
    texts = TEXTS if warm_up else TEXTS[:2]
    if given is None:
        _explain(plan, fit, texts)
        end = fit.args[-1].value if fit.args else fit
        indent = plan.line_indentation(plan.script.end(end)[0])
        plan.add_argument(fit, f"callbacks=[{_lines(plan, ours, indent)}]")
    else:
        (known, *more) = sources(plan.script, given)
        if isinstance(known, cst.List) and not more:
            _extend(plan, known, ours, texts)
        else:
            _explain(plan, fit, texts)
            plan.wrap(given, f"[{', '.join(ours)}, *(", ")]")
            plan.todo(fit, "only rank 0 may have callbacks that write files.")
        _appended(plan, given)


def _explain(plan: Plan, at: cst.CSTNode, texts: Sequence[tuple[int, str]]) -> None:
    for number, text in texts:
        plan.before(at, *plan.comment(number, text, at))


def _extend(plan: Plan, known: cst.List, ours: list[str], texts: Sequence[tuple[int, str]]) -> None:
    script = plan.script
    _explain(plan, known, texts)
    after_bracket = plan.offset(script.start(known)) + 1
    before_bracket = plan.offset(script.end(known)) - 1
    first, last = script.line(known), script.end(known)[0]
    indent = plan.line_indentation(first)
    if not known.elements:
        plan.insert(after_bracket, _lines(plan, ours, indent))
    elif script.line(known.elements[0].value) > first:  # each on a separate line
        line = script.line(known.elements[0].value)
        inner = plan.line_indentation(line)
        plan.insert(plan.offset((line, 0)), "".join(f"{inner}{x},{plan.newline}" for x in ours))
    elif first == last:
        inner = indent + script.module.default_indent
        plan.insert(after_bracket, _lines(plan, ours, indent).rstrip() + plan.newline + inner)
        comma = "" if isinstance(known.elements[-1].comma, cst.Comma) else ","
        plan.insert(before_bracket, f"{comma}{plan.newline}{indent}", last=True)
    else:
        plan.insert(after_bracket, f"{', '.join(ours)}, ")
    for element in known.elements:
        if writes(script, element.value):
            text = "All ranks have the same state, so one copy is enough."
            plan.before(known, *plan.comment(7, text, known, once=True))
            plan.wrap(element.value, "*([", "] if hvd.rank() == 0 else [])")


def _lines(plan: Plan, items: list[str], indent: str) -> str:
    """Return the text between the brackets of a list with each item on a separate line."""
    inner = indent + plan.script.module.default_indent
    return "".join(f"{plan.newline}{inner}{item}," for item in items) + plan.newline + indent


def _appended(plan: Plan, given: cst.BaseExpression) -> None:
    """Let only rank 0 append callbacks that write files to the list."""
    script = plan.script
    for call in script.calls:
        if (
            isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "append"
            and dotted(call.func.value) == dotted(given) != ""
            and len(call.args) == 1
            and writes(script, call.args[0].value)
        ):
            text = "All ranks have the same state, so one copy is enough."
            header = "if hvd.rank() == 0:"
            plan.under([plan.anchor(call)], header, *plan.comment(7, text, call, once=True))
