"""Step 7 for outputs with a state: runs of experiment trackers, writers of logs, open files.

Other lines use that state (a run's configuration, a writer passed to a function), so every rank
needs one, and those of the other ranks discard their output.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst

from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.outputs import ARRAYS, OPEN, RECORDS, opens
from qsgd_hpc.eight_steps.reading import Script, argument, find

__all__ = ["RUNS", "looks", "muted", "nowhere", "record_once"]

ONCE = "Every rank needs one; those of the other ranks discard their output."
TEMPORARY, NOWHERE = "tempfile.mkdtemp()", "os.devnull"


@dataclass(frozen=True)
class Choice:
    """An argument that only rank 0 keeps.

    Attributes:
        called: pattern of the called function's name.
        name: name of the argument.
        index: its position, -1 if it is a keyword only.
        theirs: its value on the other ranks.
        ours: its value on rank 0 if the script has none; "": do not change such a call.
    """

    called: re.Pattern[str]
    name: str
    index: int
    theirs: str
    ours: str = ""


TRACKERS = (
    Choice(re.compile(r"^wandb\.init$"), "mode", -1, '"disabled"', "None"),
    Choice(
        re.compile(r"^neptune\.(init|init_\w+|Run|Model|Project)$"), "mode", -1, '"debug"', "None"
    ),
    Choice(
        re.compile(r"^comet_ml\.(\w*Experiment|ExperimentConfig)$"), "disabled", -1, "True", "False"
    ),
)
WRITERS = (
    Choice(re.compile(r"(^|\.)SummaryWriter$"), "log_dir", 0, TEMPORARY, "None"),
    Choice(re.compile(r"^tensorflow\.(compat\.v1\.)?summary\.FileWriter$"), "logdir", 0, TEMPORARY),
    Choice(re.compile(r"^logging\.(handlers\.)?\w*FileHandler$"), "filename", 0, NOWHERE),
    Choice(re.compile(r"^logging\.basicConfig$"), "filename", -1, NOWHERE),
)
FILE, RECORD = Choice(OPEN, "file", 0, NOWHERE), Choice(RECORDS, "path", 0, NOWHERE)
ELSEWHERE = f'{TEMPORARY} + "/other"'  # these libraries cannot write to the null device
RUNS = re.compile(r"^mlflow\.(start_run|end_run|set_experiment|create_experiment|active_run)$")


@lru_cache(maxsize=8)
def muted(script: Script) -> frozenset[str]:
    """Return the trackers whose runs the script opens itself, which other ranks disable."""
    called = (script.called(call) for call in script.calls)
    opened = (name for name in called if any(each.called.match(name) for each in TRACKERS))
    return frozenset(name.partition(".")[0] for name in opened)


def record_once(plan: Plan) -> None:
    """Give each rank its run, writer and open file; those of all ranks but 0 discard output."""
    script = plan.script
    for call in script.calls:
        name = script.called(call)
        for choice in (*TRACKERS, *WRITERS):
            if choice.called.search(name):
                _choose(plan, call, choice)
        if name == "comet_ml.start" and find(call, "experiment_config") is None:
            comet = script.code(call.func).rpartition(".")[0] or "comet_ml"
            config = f"{comet}.ExperimentConfig(disabled=hvd.rank() != 0)"
            plan.step(7, ONCE, call, once=True)
            plan.add_argument(call, f"experiment_config={config}")
        if opens(script, call) and not isinstance(script.parents.get(call), cst.WithItem):
            nowhere(plan, call)
        if name == "os.makedirs" and find(call, "exist_ok", 2) is None and looks(script, call):
            plan.add_argument(call, "exist_ok=True")
        if name == "wandb.agent":
            plan.todo(call, "all ranks must train with the configuration that rank 0 is given.")
    _mlflow(plan)


def looks(script: Script, call: cst.Call) -> bool:
    """Return whether a folder is made only if it is missing: two ranks may both try."""
    return any(
        re.search(r"exists|is_?dir", script.code(branch.test)) for branch in script.branches(call)
    )


def nowhere(plan: Plan, call: cst.Call) -> None:
    """Let the other ranks write to the null device, or to a temporary file of arrays."""
    mode = argument(call, "mode", 1)
    arrays = ARRAYS.match(plan.script.called(call))
    if isinstance(mode, cst.SimpleString) and set("a+" if arrays else "x+") & set(mode.raw_value):
        plan.todo(call, "every rank opens this file for writing: let only rank 0 do so.")
    elif arrays:
        named = call.args[0].keyword.value if call.args[0].keyword is not None else ""
        _choose(plan, call, Choice(ARRAYS, named, 0, ELSEWHERE))
    else:
        _choose(plan, call, RECORD if RECORDS.match(plan.script.called(call)) else FILE)


def _choose(plan: Plan, call: cst.Call, choice: Choice) -> None:
    """Change an argument of a call on all ranks except rank 0."""
    given = find(call, choice.name, choice.index)
    if given is None and any(each.star for each in call.args):
        plan.todo(call, f"let only rank 0 record: {choice.name}={choice.theirs} on the others.")
        return
    if given is None and not choice.ours:
        return
    if "rank()" in (plan.script.code(given.value) if given is not None else ""):
        return
    plan.step(7, ONCE, call, once=True)
    _need(plan, choice.theirs)
    if given is None:
        text = f"{choice.ours} if hvd.rank() == 0 else {choice.theirs}"
        if choice.name == "disabled":
            text = "hvd.rank() != 0"
        plan.add_argument(call, f"{choice.name}={text}")
        return
    code = plan.script.code(given.value)
    if isinstance(given.value, (cst.IfExp, cst.Lambda)):
        code = f"({code})"
    plan.replace(given.value, f"{code} if hvd.rank() == 0 else {choice.theirs}")


def _need(plan: Plan, expression: str) -> None:
    """Import the module that an expression needs, unless the script imports it."""
    module, dot, _ = expression.partition(".")
    if dot and not plan.script.name_of(module) and f"import {module}" not in plan.imports:
        plan.imports.append(f"import {module}")


def _mlflow(plan: Plan) -> None:
    """Send the other ranks' runs of MLflow, which cannot be disabled, to temporary stores."""
    script = plan.script
    calls = [call for call in script.calls if script.called(call).startswith("mlflow.")]
    name = script.name_of("mlflow")
    if not calls:
        return
    if not name:
        plan.todo(calls[0], "let only rank 0 record this run.")
        return
    plan.touch(calls[0])
    _need(plan, TEMPORARY)
    plan.opening += [
        *plan.comment(7, "The runs of the other ranks go to temporary stores.", calls[0]),
        "if hvd.rank() != 0:",
        f'    {name}.set_tracking_uri(f"sqlite:///{{tempfile.mkdtemp()}}/mlflow.db")',
    ]
