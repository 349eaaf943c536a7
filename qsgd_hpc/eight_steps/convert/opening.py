"""Steps 1 and 2, and seeds: the beginning of a distributed script."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import DEPTH, Script, dotted, find, receiver

__all__ = [
    "PIN_BY_ENVIRONMENT",
    "agree_on_random_numbers",
    "import_line",
    "imports_of",
    "is_open_split",
    "is_seeded",
    "open_script",
    "unlike_ranks",
]

NUMPY = re.compile(
    r"^numpy\.random\.(rand|randn|randint|random|normal|uniform|permutation|shuffle|choice"
    r"|standard_normal|random_sample)$"
)
# Layers and transformations of data, but not RandomState or RandomSampler.
UNLIKE = re.compile(r"[Dd]ropout|Random(?!State|Sampler|Forest)[A-Z]\w+|Augment|bernoulli|Noise")
PYTHON = re.compile(r"^random\.(shuffle|sample)$")
DRAWN_SEED = re.compile(
    r"^(random\.(randint|randrange|random|getrandbits|choice)|numpy\.random\.(randint|choice)"
    r"|time\.(time|time_ns|perf_counter)|secrets\.(randbelow|randbits)|os\.urandom|torch\.seed)$"
)
SEEDED = re.compile(r"seed|PRNGKey$|jax\.random\.key$", re.IGNORECASE)
FOLDS = re.compile(r"model_selection\.\w*(KFold|ShuffleSplit)$")
SPLIT = re.compile(r"(^|\.)train_test_split$")
SHUFFLE = re.compile(r"^sklearn\.utils\.(shuffle|resample)$")
GENERATORS = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random")
SEEDS = ("keras.utils.set_random_seed", "tensorflow.keras.utils.set_random_seed")
PIN_BY_ENVIRONMENT = (
    # A job's variable names all GPUs of the node, or the rank's only one.
    'gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")',
    "gpu = gpus[hvd.local_rank() % len(gpus)] or str(hvd.local_rank())",
    'os.environ["CUDA_VISIBLE_DEVICES"] = gpu',
)
"""Lines that choose a rank's GPU, before JAX looks for its devices."""
# Calls that may stand between the imports at the top of a script, because they only prepare them.
PREPARING = re.compile(r"^(os|sys|warnings|logging|matplotlib|pathlib|site)(\.|$)")


def imports_at_top(script: Script) -> list[cst.SimpleStatementLine]:
    """Return the import statements at the top of the script."""
    found = []
    for statement in script.module.body:
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            break
        if isinstance(statement, cst.SimpleStatementLine) and any(
            isinstance(part, cst.Import | cst.ImportFrom) for part in statement.body
        ):
            found.append(statement)
        elif found and not all(
            PREPARING.match(script.called(call))
            for call in script.calls
            if statement in script.ancestors(call)
        ):
            break
    return found


def import_line(script: Script) -> int:
    """Return the last line of the script's imports, 0 if it has none at its top."""
    found = imports_at_top(script)
    return script.end(found[-1])[0] if found else 0


def imports_of(script: Script, *modules: str) -> list[str]:
    """Return imports of the modules that the script does not import at its top, by its names."""
    top = imports_at_top(script)
    known = {
        each.module: each.alias
        for each in script.imports
        if each.alias and script.statement(each.node) in top
    }
    names = [(m, script.name_of(m) or m) for m in modules if m not in known]
    return [f"import {m}" if name == m else f"import {m} as {name}" for m, name in names]


def calls_at_module_level(script: Script) -> bool:
    """Return whether the script's own functions are called when it is imported."""
    entry = script.entry
    return any(
        script.function(call) is None
        and script.class_of(call) is None
        and script.definition(call) is not None
        and not any(a is entry for a in script.ancestors(call) if isinstance(entry, cst.If))
        for call in script.calls
    )


def open_script(plan: Plan, module: str, more: Sequence[str], pin: Sequence[str]) -> None:
    """Import the distributed module, and initialise before all other work.

    Call this last, because the place depends on the other insertions.

    Args:
        module: such as "qsgd_hpc.torch".
        more: further imports.
        pin: the lines that choose a rank's GPU, and set its seed.
    """
    script = plan.script
    _name_visible_gpus(plan)
    entry = script.entry
    first = entry.body.body[0] if isinstance(entry, cst.If) else None
    early = plan.needs_module_level_init or calls_at_module_level(script)
    in_entry = isinstance(first, cst.BaseStatement) and not early
    at = first if first is not None and in_entry else script.module.body[0]
    imports = [*more, *plan.imports, f"import {module} as hvd"]
    begin = [
        *plan.comment(1, "From here on every rank knows its number and how many there are.", at),
        "hvd.init()",
        *plan.comment(2, "The ranks of a node each take their own.", at),
        *pin,
        *plan.opening,
    ]
    if in_entry:
        plan.before(at, *begin)
        _insert_imports(plan, imports)
    else:
        _insert_imports(plan, [*imports, "", *begin])


def _name_visible_gpus(plan: Plan) -> None:
    """Leave a choice of GPUs in the environment to the author: all ranks of a node would share it.

    No choice is `""` or `"-1"`, which hides all GPUs.
    """
    script = plan.script
    for node in script.nodes:
        if isinstance(node, cst.SimpleString) and node.raw_value == "CUDA_VISIBLE_DEVICES":
            value = _assigned(script, node)
            hides = isinstance(value, cst.SimpleString) and value.raw_value in ("", "-1")
            if value is not None and not hides:
                plan.todo(node, "leave out this choice of GPUs: each rank takes its own.")


def _assigned(script: Script, key: cst.SimpleString) -> cst.BaseExpression | None:
    """Return the value of `os.environ[key] = value`, None if the key is only read."""
    for around in script.ancestors(key):
        if isinstance(around, cst.Assign):
            target = around.targets[0].target
            inside = isinstance(target, cst.Subscript) and key in script.inside(target)
            return around.value if inside else None
        if isinstance(around, cst.Call):
            sets = script.called(around) in ("os.environ.setdefault", "os.putenv")
            return around.args[-1].value if sets else None
    return None


def _insert_imports(plan: Plan, lines: Sequence[str]) -> None:
    script = plan.script
    found = imports_at_top(script)
    if found:
        plan.after(found[-1], *lines)
        return
    body = script.module.body
    docstring = script.module.get_docstring() is not None
    if docstring:
        plan.after(body[0], "", *lines)
    else:
        text = "".join(f"{line}{plan.newline}" for line in (*lines, ""))
        plan.insert(0, text, -(10**10))


def unlike_ranks(script: Script) -> bool:
    """Return whether training draws random numbers that should differ between ranks."""
    names = (dotted(n) for n in script.nodes if isinstance(n, cst.Name | cst.Attribute))
    return any(UNLIKE.search(name) for name in names)


def agree_on_random_numbers(plan: Plan) -> None:
    """Use one seed where the script draws one; leave a TODO where data are drawn without a seed."""
    script = plan.script
    seeds = {call for call in script.calls if _is_seed(script, call)}
    for call in seeds:
        plan.wrap(call, "hvd.broadcast_object(", ")")
    seeded = is_seeded(script, "numpy.random.seed", *SEEDS)
    python_seeded = is_seeded(script, "random.seed", *SEEDS)
    for call in script.calls:
        name = script.called(call)
        once = not _is_repeated(script, call) and script.class_of(call) is None
        open_split = is_open_split(script, call) and not seeded
        open_draw = (bool(NUMPY.match(name)) and not seeded and not _is_repeated(script, call)) or (
            bool(PYTHON.match(name)) and not python_seeded and once
        )
        open_generator = name in GENERATORS and not call.args
        if call in seeds:
            continue
        if open_split or open_draw or open_generator:
            how = "random_state=0" if open_split else "a seed"
            plan.todo(
                call, f"ranks draw different numbers here: give it {how}, so that they agree."
            )


def is_open_split(script: Script, call: cst.Call) -> bool:
    """Return whether scikit-learn or pandas splits or shuffles data by the seed of numpy."""
    name = script.called(call)
    shuffles = "ShuffleSplit" in name or find(call, "shuffle") is not None
    samples = receiver(call, "sample") is not None and find(call, "frac") is not None
    draws = SPLIT.search(name) or (FOLDS.search(name) and shuffles)
    once = (SHUFFLE.match(name) or samples) and not _is_repeated(script, call)
    return bool(draws or once) and find(call, "random_state") is None


def is_seeded(script: Script, *names: str) -> bool:
    """Return whether one of these functions, which set a seed, is called without a condition."""
    return any(script.called(call) in names and _is_always(script, call) for call in script.calls)


def _is_always(script: Script, call: cst.Call, depth: int = DEPTH) -> bool:
    """Return whether a call depends on no condition, as far as the text shows."""
    if any(branch.node is not script.entry for branch in script.branches(call)):
        return False
    calls = script.calls_of(script.function(call)) if depth else ()
    return not calls or any(_is_always(script, each, depth - 1) for each in calls)


def _is_repeated(script: Script, call: cst.Call, depth: int = DEPTH) -> bool:
    """Return whether a loop repeats a call, or all calls of its function, as of a training step."""
    if script.loops(call):
        return True
    calls = script.calls_of(script.function(call))
    return bool(calls and depth) and all(_is_repeated(script, c, depth - 1) for c in calls)


def _is_seed(script: Script, call: cst.Call) -> bool:
    """Return whether a script draws a seed here once, such as `args.seed = random.randint(...)`."""
    if not DRAWN_SEED.match(script.called(call)) or not _runs_once(script, call):
        return False
    for around in script.ancestors(call):
        if SEEDED.search(script.called(around)):
            return True
        if isinstance(around, cst.Arg) and around.keyword is not None:
            named = around.keyword.value
            if SEEDED.search(named) or named == "random_state":
                return True
        if isinstance(around, cst.Assign):
            return any(SEEDED.search(dotted(target.target)) for target in around.targets)
        if isinstance(around, cst.AnnAssign):
            return bool(SEEDED.search(dotted(around.target)))
        if isinstance(around, cst.BaseStatement):
            return False
    return False


def _runs_once(script: Script, call: cst.Call, depth: int = DEPTH) -> bool:
    """Return whether each rank makes a call once, not for samples or in a loader's workers."""
    if script.loops(call) or script.class_of(call) or not depth:
        return False
    function = script.function(call)
    callers = script.calls_of(function)
    once = bool(callers) and all(_runs_once(script, each, depth - 1) for each in callers)
    return function is None or once
