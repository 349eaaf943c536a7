"""Step 7: only rank 0 prints, saves and shows progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst

from qsgd_hpc.eight_steps.check.helpers import own_module
from qsgd_hpc.eight_steps.check.saving import (
    ARRAYS,
    OPEN,
    RECORDS,
    WRITES,
    is_temporary,
    opens,
    opens_path,
)
from qsgd_hpc.eight_steps.convert import words
from qsgd_hpc.eight_steps.convert.opening import import_line
from qsgd_hpc.eight_steps.convert.plan import HEADER, Edit, Plan
from qsgd_hpc.eight_steps.reading import Script, argument, dotted, find, names_in, read
from qsgd_hpc.errors import UsageError

__all__ = ["guard_outputs", "is_file", "is_output"]

PRINTS = re.compile(
    r"^(print|tensorflow\.print|pprint\.pprint|sys\.std(out|err)\.(write|flush)"
    r"|tqdm(\.\w+)*\.write|logging\.(getLogger\(\)\.)?(debug|info|warning|error|critical|log))$"
)
SAVES = re.compile(
    rf"^({WRITES}|pickle\.dump|json\.dump|matplotlib\.pyplot\.show|shutil\.(copy\w*|move|rmtree)"
    r"|os\.(remove|rename|replace|mkdir|unlink)|(wandb|mlflow|neptune)\.\w+)$"
)
SHOWS = re.compile(
    r"(^(wandb|mlflow|neptune)\.\w+|(^|\.)(show|savefig|imsave|imwrite|save_image|summary|add_\w+))$"
)
METHODS = re.compile(
    r"^(save|save_weights|save_model|save_pretrained|export|summary|savefig|to_csv|to_json"
    r"|to_(parquet|pickle|hdf|netcdf|zarr|feather|excel)|write_text|write_bytes|tofile|unlink"
    r"|add_(scalars?|images?|histogram|graph|text|hparams|figure|embedding|pr_curve|summary))$"
)
WRITERS = re.compile(
    r"(SummaryWriter|FileWriter|create_file_writer|csv\.\w*writer|DictWriter)\(\)$"
)


def is_print(script: Script, call: cst.Call) -> bool:
    return bool(PRINTS.match(script.called(call)))


def is_output(script: Script, call: cst.Call) -> bool:
    """Return whether a call prints, logs or writes a file."""
    name = script.called(call)
    if name.partition(".")[0] in muted(script) or RUNS.match(name):
        return name.endswith(".login")
    if PRINTS.match(name):
        return True
    if is_temporary(script, *call.args):
        return False
    if SAVES.match(name):
        return True
    if not isinstance(call.func, cst.Attribute) or script.definition(call) is not None:
        return False
    method = call.func.attr.value
    if name == "os.makedirs":
        return find(call, "exist_ok", 2) is None and not looks(script, call)
    if method == "mkdir":
        return find(call, "exist_ok") is None
    if method in ("rename", "replace"):  # methods of a path; a string's would have no effect
        return len(call.args) == 1 and call.args[0].keyword is None
    return bool(METHODS.match(method)) or bool(WRITERS.search(script.qualified(call.func.value)))


def is_file(script: Script, call: cst.Call) -> bool:
    """Return whether a call writes or removes a file that the script may read."""
    return is_output(script, call) and not (
        is_print(script, call) or SHOWS.search(script.called(call))
    )


def is_progress_bar(script: Script, call: cst.Call) -> bool:
    """Return whether a call makes a progress bar of tqdm."""
    return bool(re.match(r"^tqdm\.(\w+\.)*(tqdm|trange)$", script.called(call)))


def only_writes(script: Script, statement: cst.With) -> bool:
    """Return whether a block has no results that later lines or other ranks may need."""
    works = (
        *(cst.For, cst.While, cst.Return),
        *(cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr),
    )
    inner = script.inside(statement.body)
    opened = {dotted(item.asname.name) for item in statement.items if item.asname is not None}
    opened -= {""}
    return not any(
        (isinstance(n, works) and not stores(n, opened))
        or (isinstance(n, cst.Call) and script.definition(n) is not None)
        for n in inner
    )


def stores(node: cst.CSTNode, files: set[str]) -> bool:
    """Return whether a node is an assignment to a part of a file: `file["x"] = ...`."""
    if not isinstance(node, cst.Assign):
        return False
    targets = [each.target for each in node.targets]
    return all(isinstance(t, cst.Subscript) and names_in(t.value) & files for t in targets)


def outputs(script: Script, statement: cst.CSTNode) -> tuple[cst.Call, ...]:
    """Return the calls of a statement that only prints or writes, else ()."""
    if isinstance(statement, cst.If):
        parts: Sequence[cst.CSTNode] = statement.body.body
        if not isinstance(statement.body, cst.SimpleStatementSuite) or statement.orelse:
            return ()
    elif isinstance(statement, cst.SimpleStatementLine):
        parts = statement.body
    else:
        return ()
    calls = [call for part in parts if (call := output_of(script, part)) is not None]
    return tuple(calls) if len(calls) == len(parts) else ()


def output_of(script: Script, part: cst.CSTNode) -> cst.Call | None:
    """Return the call of a simple statement that only prints or writes."""
    call = part.value if isinstance(part, cst.Expr) else None
    return call if isinstance(call, cst.Call) and is_output(script, call) else None


def own_work(
    script: Script, node: cst.CSTNode, training: frozenset[cst.FunctionDef]
) -> tuple[bool, bool]:
    """Return whether an expression calls the script's own functions that train, or that loop."""
    own = [script.definition(call) for call in script.calls_in(node)]
    functions = [function for function in own if function is not None]
    trains = any(function in training for function in functions)
    works = (cst.For, cst.While, cst.With)
    return trains, any(isinstance(n, works) for f in functions for n in script.inside(f.body))


def guard_outputs(
    plan: Plan, training: frozenset[cst.FunctionDef]
) -> dict[cst.CSTNode, cst.CSTNode]:
    """Let only rank 0 print and write, but let every rank compute the values.

    Args:
        plan: the plan to extend.
        training: the functions that every rank must call.
    Returns:
        The statements that only rank 0 runs, each with the last one under its condition.
    """
    script = plan.script
    first_line = import_line(script)  # nothing up to it is changed
    record_once(plan)
    done: dict[cst.CSTNode, cst.CSTNode] = {}
    for block in script.nodes:
        if not isinstance(block, cst.Module | cst.IndentedBlock):
            continue
        if any(each in done for each in script.ancestors(block)):
            continue
        group: list[cst.BaseStatement] = []
        for statement in block.body:
            assert isinstance(statement, cst.BaseStatement)
            alone = script.line(statement) > first_line and _alone(plan, statement, training)
            if group and (not alone or _hoists(plan, statement, training)):
                _guard(plan, group, training)
                group = []
            if alone:
                group.append(statement)
                done |= dict.fromkeys(group, statement)
        if group:
            _guard(plan, group, training)
    for node in script.nodes:
        if not isinstance(node, cst.SimpleStatementSuite):
            continue
        some = any(output_of(script, part) is not None for part in node.body)
        if some and not outputs(script, script.parents.get(node, node)):
            plan.todo(node, "every rank does this, but only rank 0 should write or print.")
    _bars(plan)
    _name_other_writers(plan)
    return done


def _split(plan: Plan, line: cst.SimpleStatementLine, training: frozenset[cst.FunctionDef]) -> None:
    """Guard the outputs among the statements of a line, which are separated by semicolons."""
    script = plan.script
    found = [output_of(script, part) for part in line.body]
    calls = [call for call in found if call is not None]
    if not calls:
        return
    if any(any(own_work(plan.script, call, training)) for call in calls):
        plan.todo(line, "every rank must do the work in this, but only rank 0 write or print.")
        return
    start = plan.newline + script.indentation(line)
    guard = f"{start}if hvd.rank() == 0:{start}{script.module.default_indent}"
    text = words.PRINTED if all(is_print(script, call) for call in calls) else words.WRITTEN
    plan.step(7, text, line, once=True)
    if found[0] is not None:
        place = script.offset(script.start(line.body[0]))
        plan.insert(place, guard.removeprefix(start), HEADER)
    for before, after, call in zip(line.body, line.body[1:], found[1:], strict=False):
        begin, end = script.offset(script.end(before)), script.offset(script.start(after))
        plan.edits.append(Edit(begin, end, guard if call is not None else start))


def _hoists(plan: Plan, statement: cst.BaseStatement, training: frozenset[cst.FunctionDef]) -> bool:
    return any(
        any(own_work(plan.script, call, training)) for call in outputs(plan.script, statement)
    )


def _alone(plan: Plan, statement: cst.BaseStatement, training: frozenset[cst.FunctionDef]) -> bool:
    """Return whether only rank 0 should run a statement; add a TODO if that is undecided."""
    script = plan.script
    if isinstance(statement, cst.With):
        files = [item.item for item in statement.items if opens(script, item.item)]
        if files and not only_writes(script, statement):
            for file in files:
                nowhere(plan, cst.ensure_type(file, cst.Call))
            return False
        return bool(files)
    calls = outputs(script, statement)
    if not calls:
        if isinstance(statement, cst.SimpleStatementLine):
            _assigned(plan, statement)
            _split(plan, statement, training)
        return False
    for call in calls:
        trains, _ = own_work(plan.script, call, training)
        hoistable = len(calls) == 1 and isinstance(statement, cst.SimpleStatementLine)
        if trains and not (is_print(script, call) and hoistable):
            plan.todo(statement, "every rank must do the training in this, but only rank 0 write.")
            return False
    return True


def _assigned(plan: Plan, line: cst.SimpleStatementLine) -> None:
    """Let only rank 0 write what a statement writes and whose path it keeps.

    Leave a TODO if all ranks may need the path.
    """
    script = plan.script
    for part in line.body:
        value = getattr(part, "value", None)
        if isinstance(part, cst.Assign | cst.AnnAssign) and isinstance(value, cst.Call):
            name = script.called(value)
            if not re.search(r"(Saver|Checkpoint|CheckpointManager)\(\)\.save$", name):
                continue
            made, path = script.assigned(value), script.target(value)
            uses = (n for n in script.nodes if dotted(n) == path and n is not made)
            if path and all(_printed(script, each) for each in uses):
                plan.step(7, words.WRITTEN, line, once=True)
                plan.wrap(value, "", " if hvd.rank() == 0 else None")
            else:
                plan.todo(line, "only rank 0 may do this; which value do the others use?")


def _printed(script: Script, node: cst.CSTNode) -> bool:
    """Return whether a value is only printed, without a function of the script."""
    calls = [each for each in script.ancestors(node) if isinstance(each, cst.Call)]
    own = any(script.definition(each) is not None for each in calls)
    return any(is_print(script, each) for each in calls) and not own


def _guard(
    plan: Plan, group: list[cst.BaseStatement], training: frozenset[cst.FunctionDef]
) -> None:
    script = plan.script
    calls = [call for statement in group for call in outputs(script, statement)]
    for call in calls:
        if is_print(script, call) and any(own_work(plan.script, call, training)):
            _hoist(plan, call)
    saves = [c for c in calls if not is_print(script, c)]
    opens = any(isinstance(statement, cst.With) for statement in group)
    text = words.WRITTEN if saves or opens else words.PRINTED
    plan.under(group, "if hvd.rank() == 0:", *plan.comment(7, text, group[0], once=True))


def _hoist(plan: Plan, call: cst.Call) -> None:
    """Let every rank compute the values that rank 0 prints."""
    given = [arg for arg in call.args if arg.keyword is None]
    values = ", ".join(("*" if a.star else "") + plan.script.code(a.value) for a in given)
    plan.before(call, "# Every rank takes part in computing what rank 0 prints.")
    plan.before(call, f"printed = ({values}{',' * (len(given) == 1)})")
    start = plan.script.span(given[0].value)[0] - bool(given[0].star)
    end = plan.script.span(given[-1].value)[1]
    plan.edits.append(Edit(start, end, "*printed"))


def _name_other_writers(plan: Plan) -> None:
    """Leave what the script uses of modules next to it, and writes files there, to the author."""
    script = plan.script
    if not script.path.is_file():
        return
    path = script.path.resolve()
    found = (own_module(path.parent, each.module) for each in script.imports)
    for file in sorted({file for file in found if file is not None and file != path}):
        try:
            module = read(file)
        except UsageError:
            continue
        writers = _writers(module)
        for call in script.calls if writers else ():
            name = dotted(call.func).rpartition(".")[2]
            if name in writers:
                text = f"{name} of {file.name} writes a file (line {module.line(writers[name])})"
                plan.todo(call, f"{text}: let only rank 0 do that.")


def _writers(module: Script) -> dict[str, cst.Call]:
    """Return the first call that writes a file in each function or class of a module, by name."""
    found: dict[str, cst.Call] = {}
    for call in module.calls:
        if SAVES.match(module.called(call)) or opens(module, call):
            around = module.ancestors(call)
            outer = [n for n in around if isinstance(n, cst.FunctionDef | cst.ClassDef)]
            if outer:
                found.setdefault(outer[-1].name.value, call)
    return found


def _bars(plan: Plan) -> None:
    script = plan.script
    for call in script.calls:
        if is_progress_bar(script, call) and find(call, "disable") is None:
            plan.step(7, words.PROGRESS, call, once=True)
            plan.add_argument(call, "disable=hvd.rank() != 0")
    for node in script.nodes:
        if isinstance(node, cst.Lambda) and any(
            dotted(call.func) == "print" for call in script.calls_in(node.body)
        ):
            plan.todo(node, "this prints on every rank.")


# Outputs with a state: runs of experiment trackers, writers of logs, open files. Other lines use
# that state (a run's configuration, a writer passed to a function), so every rank needs one.
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
LOGS = (
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
        for choice in (*TRACKERS, *LOGS):
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
    text = mode.raw_value if isinstance(mode, cst.SimpleString) else ""
    if opens_path(plan.script, call) or set("a+" if arrays else "x+") & set(text):
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
