"""Rules and findings of the checker, and the edits that fix them without a change around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import libcst as cst

from qsgd_hpc.eight_steps.reading import Script
from qsgd_hpc.eight_steps.tree import margin, starts

__all__ = [
    "BY_ID",
    "RULES",
    "Edit",
    "Finding",
    "Rule",
    "Severity",
    "add_argument",
    "apply",
    "behind",
    "guard",
    "insert_after",
    "insert_before",
    "replace",
]


class Severity(Enum):
    """Severity of a finding; the values are SARIF's levels."""

    ERROR = "error"  # wrong results, destroyed files or a job that hangs
    WARNING = "warning"  # slower, or less accurate, than intended
    NOTE = "note"  # a matter of taste


@dataclass(frozen=True)
class Rule:
    """One rule of the checker.

    Attributes:
        id: stable; the first digit is the number of the step, 0 for changes of other software, 9
            for jobs that hang.
        severity: default severity of its findings.
        title: the fault, in a few words.
        remedy: what to do, with "hvd" for the script's own alias.
    """

    id: str
    severity: Severity
    title: str
    remedy: str

    @property
    def step(self) -> int | None:
        """The number of its step, None if it belongs to none."""
        number = int(self.id[2])
        return number if 1 <= number <= 8 else None


# Their ids are stable: an id is never reused for another rule.
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# fmt: off
RULES = tuple(Rule(*row) for row in (
    ("QH001", WARNING, "not in Keras 3", "Use what Keras 3 has, or tf-keras."),
    ("QH101", ERROR, "no init", "Call hvd.init() before anything else of hvd."),
    ("QH102", ERROR, "used before init", "Move hvd.init() before this line."),
    ("QH103", ERROR, "function not called", "Call it: write the parentheses behind it."),
    ("QH201", ERROR, "GPU not pinned",
     "Choose the GPU by hvd.local_rank(), for instance torch.cuda.set_device(hvd.local_rank())."),
    ("QH301", ERROR, "data not sharded",
     "Give each rank its part: a DistributedSampler, dataset.shard(hvd.size(), hvd.rank()), or "
     "array[hvd.rank()::hvd.size()]."),
    ("QH302", WARNING, "sharded too late",
     "Call shard(hvd.size(), hvd.rank()) before shuffle() and batch()."),
    ("QH303", WARNING, "sampler without set_epoch",
     "Call sampler.set_epoch(epoch) at the beginning of each epoch."),
    ("QH304", ERROR, "sampler does not know the ranks",
     "Pass num_replicas=hvd.size(), rank=hvd.rank() to DistributedSampler."),
    ("QH305", WARNING, "ranks may have unequal numbers of batches",
     "Drop the last batch (drop_last=True, drop_remainder=True), take an equal number of "
     "batches on all ranks, or end the epoch with hvd.join()."),
    ("QH401", WARNING, "learning rate not scaled",
     "Multiply the learning rate by hvd.size(), and warm up for some epochs."),
    ("QH501", ERROR, "optimizer not wrapped",
     "Wrap it: optimizer = hvd.DistributedOptimizer(optimizer)."),
    ("QH502", ERROR, "gradient tape not wrapped",
     "Wrap it before gradient(): tape = hvd.DistributedGradientTape(tape)."),
    ("QH503", ERROR, "several optimizers without named_parameters",
     "Pass named_parameters= with names that no other optimizer has."),
    ("QH504", ERROR, "gradients clipped while they are averaged",
     "Call optimizer.synchronize() before this line, and step() within 'with "
     "optimizer.skip_synchronize():'."),
    ("QH601", ERROR, "initial state not broadcast",
     "Broadcast parameters and optimizer state from rank 0 before the first step."),
    ("QH602", WARNING, "broadcast before there is a state",
     "Broadcast when weights are loaded and the optimizer has its variables."),
    ("QH603", ERROR, "broadcast after training", "Move the broadcast before the training loop."),
    ("QH604", WARNING, "optimizer state not broadcast",
     "Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after loading it."),
    ("QH701", ERROR, "every rank writes the checkpoint", "Write it where hvd.rank() == 0."),
    ("QH702", NOTE, "every rank prints", "Print where hvd.rank() == 0."),
    ("QH703", WARNING, "every rank writes a log", "Open it where hvd.rank() == 0."),
    ("QH801", WARNING, "one rank's metric reported as the whole",
     "Average it over the ranks first: hvd.allreduce(value), or MetricAverageCallback."),
    ("QH802", WARNING, "decision by one rank's value",
     "Average it over the ranks first, so that all of them leave: hvd.allreduce(value)."),
    ("QH901", ERROR, "collective on some ranks only",
     "Call it on every rank, outside of the branch."),
    ("QH902", ERROR, "function with a collective on some ranks only",
     "Call it on every rank, and let rank 0 alone use the result."),
    ("QH903", ERROR, "some ranks leave before a collective",
     "Let every rank come to the collective; guard only what rank 0 does alone."),
))
# fmt: on
BY_ID = {each.id: each for each in RULES}


@dataclass(frozen=True)
class Edit:
    """A replacement of text; places are (line from 1, column from 0), the end excluded."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Finding:
    """One violation of a rule.

    Attributes:
        rule: the violated rule.
        line: from 1.
        column: from 1.
        reason: the fault at this position.
        remedy: what to do.
        severity: its severity.
        edits: the edits that fix it safely; empty if only the author can fix it.
    """

    rule: Rule
    line: int
    column: int
    reason: str
    remedy: str
    severity: Severity
    edits: tuple[Edit, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether --fix can fix it."""
        return bool(self.edits)


def replace(script: Script, node: cst.CSTNode, text: str) -> Edit:
    """Replace a node's text."""
    return Edit(script.start(node), script.end(node), text)


def alone(script: Script, statement: cst.BaseStatement) -> bool:
    """Return whether a statement is alone on its lines, so that lines can be added around it."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) and statement.decorators:
        return False
    is_elif = isinstance(script.parents.get(statement), cst.If)
    return not is_elif and not script.indentation(statement).strip()


def insert_before(script: Script, node: cst.CSTNode, *lines: str) -> tuple[Edit, ...]:
    """Insert lines before the statement that contains a node, with the same indentation."""
    statement = script.statement(node)
    if not alone(script, statement):
        return ()
    place = (script.line(statement), 0)
    indent, end = script.indentation(statement), script.module.default_newline
    return (Edit(place, place, "".join(f"{indent}{each}{end}" for each in lines)),)


def insert_after(script: Script, node: cst.CSTNode, *lines: str) -> tuple[Edit, ...]:
    """Insert lines after the statement that contains a node, with the same indentation."""
    statement = script.statement(node)
    if not alone(script, statement):
        return ()
    line, _ = script.end(statement)
    place = (line, len(script.lines[line - 1]))
    indent, end = script.indentation(statement), script.module.default_newline
    return (Edit(place, place, "".join(f"{end}{indent}{each}" for each in lines)),)


def add_argument(script: Script, call: cst.Call, text: str) -> Edit:
    """Add an argument after the last one of a call."""
    if call.args:
        place, text = behind(script, call.args[-1]), f", {text}"
    else:
        line, column = script.end(call)
        place = (line, column - 1)
    return Edit(place, place, text)


def behind(script: Script, arg: cst.Arg) -> tuple[int, int]:
    """Return the place after the value of an argument and the parentheses around it."""
    line, column = script.end(arg.value)
    return line, column + len(getattr(arg.value, "rpar", ()))


def guard(script: Script, node: cst.CSTNode, condition: str) -> tuple[Edit, ...]:
    """Put the simple statement that contains a node under a condition."""
    statement = script.statement(node)
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return ()
    if not isinstance(statement.body[0], cst.Expr) or not alone(script, statement):
        return ()
    first, _ = script.start(statement)
    last, _ = script.end(statement)
    if any(spans_lines(script, n) for n in script.inside(statement)):
        return ()
    indent = script.indentation(statement)
    step = script.module.default_indent
    head = Edit((first, 0), (first, 0), f"{indent}if {condition}:{script.module.default_newline}")
    numbered = [(n, script.lines[n - 1]) for n in range(first, last + 1)]
    begins = [(n, margin(line)) for n, line in numbered if line.strip()]
    return (head, *(Edit(begin, begin, step) for begin in begins))


def spans_lines(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a node is a string over several lines, whose text an indent would change."""
    is_text = isinstance(node, (cst.SimpleString, cst.FormattedString))
    return is_text and script.end(node)[0] > script.line(node)


def apply(text: str, groups: Iterable[Sequence[Edit]]) -> tuple[str, int]:
    """Apply groups of edits; a group that overlaps an earlier one is skipped completely.

    Returns:
        The new text, and the number of applied groups.
    """
    offsets = starts(text)

    def at(place: tuple[int, int]) -> int:
        return min(offsets[place[0] - 1] + place[1], len(text))

    taken: list[tuple[int, int, int, str]] = []
    count = 0
    for group in groups:
        spans = [(at(e.start), at(e.end), e.text) for e in group]
        if not spans or any(overlap(a, b, c, d) for a, b, _ in spans for c, d, _, _ in taken):
            continue
        taken += [(a, b, len(taken) + i, new) for i, (a, b, new) in enumerate(spans)]
        count += 1
    for begin, end, _, new in sorted(taken, key=lambda t: t[:3], reverse=True):
        text = text[:begin] + new + text[end:]
    return text, count


def overlap(a: int, b: int, c: int, d: int) -> bool:
    return (a, b) == (c, d) or (a < d and c < b)
