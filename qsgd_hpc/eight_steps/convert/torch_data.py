"""Step 3 for PyTorch's loaders: a sampler selects each rank's part of every epoch.

A dictionary may have a loader for each phase: `for x, y in loaders[phase]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, origins, sources, zipped
from qsgd_hpc.eight_steps.convert.opening import is_seeded, unlike_ranks
from qsgd_hpc.eight_steps.convert.plan import Plan
from qsgd_hpc.eight_steps.reading import Script, dotted, find, names_in

__all__ = ["Loaders", "find_loaders", "seeding", "set_epochs", "shard_loaders"]

# Samplers whose place a DistributedSampler can take.
REPLACED = re.compile(r"^torch\.utils\.data\.(sampler\.)?(SubsetRandom|Random|Sequential)Sampler$")
DRAWS = re.compile(r"^torch\.utils\.data\.(sampler\.)?(SubsetRandom|Random|WeightedRandom)Sampler$")
LOADER = re.compile(r"^torch\.utils\.data\.(dataloader\.)?DataLoader$")
TEXT = "Each rank draws from its own part, of equal size on all ranks; unchanged on one rank."


@dataclass(frozen=True, eq=False)
class Phases:
    """A dictionary comprehension that makes a loader for each phase.

    Attributes:
        variable: the name of its key.
        training: the key of the loader for training, as Python code.
    """

    variable: str
    training: str

    @property
    def is_training(self) -> str:
        """The condition under which it makes the loader for training, as Python code."""
        return f"{self.variable} == {self.training}"


@dataclass(frozen=True, eq=False)
class Fed:
    """A training loop with its loaders.

    Attributes:
        loop: the loop.
        calls: the calls that make its loaders.
        train: those known to be for training, by the key.
        when: the condition under which it takes that for training, as Python code; "": unknown.
        several: whether it may iterate over several loaders, known or not.
        beside: the further iterables of `zip(a, b)`, each with the calls that make its loaders.
    """

    loop: TrainLoop
    calls: tuple[cst.Call, ...]
    train: tuple[cst.Call, ...] = ()
    when: str = ""
    several: bool = False
    beside: tuple[tuple[cst.BaseExpression, tuple[cst.Call, ...]], ...] = ()

    @property
    def tests(self) -> bool:
        """Whether the loop may also iterate over data that every rank has completely."""
        return (self.several or len(self.calls) > 1) and not self.when


@dataclass(frozen=True, eq=False)
class Loaders:
    """The loaders of a script: those for training, those of each loop, and all.

    Attributes:
        certain: whether a loop takes its batches from those for training; else all that shuffle
            are taken for them.
    """

    train: tuple[cst.Call, ...]
    fed: tuple[Fed, ...]
    all: tuple[cst.Call, ...]
    certain: bool = True

    def names(self, script: Script) -> tuple[str, ...]:
        """Return the names of the loaders for training, such as `loaders["train"]`."""
        found = [script.target(call) for call in self.train]
        for call in self.train:
            phases, made = comprehension(script, call), script.target(script.parents[call])
            found += [f"{made}[{phases.training}]"] if phases is not None and made else []
        return tuple(name for name in found if name)

    def unsized(self, script: Script) -> frozenset[str]:
        """Return the names of the loaders whose number of batches is unknown."""
        made = ((call, _stream_of(script, call)) for call in self.all)
        streams = [call for call, kind in made if kind and (kind, "__len__") not in script.bindings]
        return frozenset(script.target(call) for call in streams)


def seeding(script: Script) -> list[str]:
    """Return the lines after which all ranks draw equal numbers, unless the script has a seed."""
    if is_seeded(script, "torch.manual_seed"):
        return []
    torch = script.name_of("torch") or "torch"
    return [
        "# All ranks draw the same numbers, so that they split and shuffle data equally.",
        f"{torch}.manual_seed(hvd.broadcast_object({torch}.initial_seed()))",
    ]


def sampler_of(script: Script) -> str:
    """Return the script's name for the class of PyTorch's sampler."""
    return f"{script.name_of('torch') or 'torch'}.utils.data.distributed.DistributedSampler"


def shuffles(call: cst.Call) -> bool:
    given = find(call, "shuffle", 2)
    return given is not None and dotted(given.value) not in ("False", "None")


def options_of(call: cst.Call) -> str:
    """Return the name of the mapping in `DataLoader(data, **options)`, or ""."""
    stars = [arg for arg in call.args if arg.star]
    return dotted(stars[0].value) if len(stars) == 1 and stars[0].star == "**" else ""


def draws(script: Script, call: cst.Call) -> bool:
    """Return whether a loader shuffles, by itself or by its sampler."""
    own = _own_sampler(script, call)
    return shuffles(call) or (own is not None and bool(DRAWS.match(script.called(own))))


def may_shuffle(script: Script, call: cst.Call) -> bool:
    return draws(script, call) or bool(options_of(call))


def find_loaders(script: Script, loops: Sequence[TrainLoop]) -> Loaders:
    """Return the loaders of the training loops; of several in one loop, those that shuffle."""
    every = tuple(c for c in script.calls if LOADER.match(script.called(c)))
    found = tuple(loaders_of(script, loop, every) for loop in loops)
    certain: list[cst.Call] = []
    for each in found:
        loop, calls = each.loop, each.calls
        for _, others in each.beside:
            certain += others if len(others) == 1 else [c for c in others if draws(script, c)]
        if each.train:
            certain += each.train
            continue
        drawn = tuple(c for c in every if any(c is m for m in _drawn(script, loop)))
        certain += calls if len(calls) == 1 else [c for c in calls if draws(script, c)]
        alone = len(drawn) == 1 and not calls
        certain += drawn if alone else [c for c in drawn if draws(script, c)]
    train = tuple(dict.fromkeys(certain)) or tuple(c for c in every if draws(script, c))
    return Loaders(train, found, every, bool(certain))


def _drawn(script: Script, loop: TrainLoop) -> list[cst.BaseExpression]:
    """Return the sources of the iterators from which a loop takes its batches by `next`."""
    found: list[cst.BaseExpression] = []
    for call in script.calls_in(loop.loop.body):
        if script.called(call) == "next" and call.args:
            for made in sources(script, call.args[0].value):
                if isinstance(made, cst.Call) and script.called(made) == "iter" and made.args:
                    found += origins(script, made.args[0].value)
    return found


def comprehension(script: Script, call: cst.CSTNode) -> Phases | None:
    """Return the phases of `{x: DataLoader(datasets[x], ...) for x in ["train", "val"]}`."""
    made = script.parents.get(call)
    if not isinstance(made, cst.DictComp) or made.value is not call:
        return None
    each = made.for_in
    keys = script.value(each.iter)
    if each.ifs or each.inner_for_in or dotted(made.key) != dotted(each.target) != "":
        return None
    known = keys.elements if isinstance(keys, cst.List | cst.Tuple) else ()
    found = [key.value for key in known if _trains(script, key.value)]
    return Phases(dotted(each.target), script.code(found[0])) if len(found) == 1 else None


def loaders_of(script: Script, loop: TrainLoop, loaders: Sequence[cst.Call]) -> Fed:
    """Return a training loop with its loaders."""
    over = iterable(script, loop.loop)
    calls: list[cst.CSTNode] = []
    train: list[cst.CSTNode] = []
    when = ""
    fed = sources(script, over) if over is not None else ()
    several = len({made if isinstance(made, cst.Call) else script.code(made) for made in fed}) > 1
    for made in (each for given in fed for each in origins(script, given)):
        calls.append(made)
        if not isinstance(made, cst.Subscript) or not isinstance(made.slice[0].slice, cst.Index):
            continue
        key = made.slice[0].slice.value
        is_fixed = isinstance(script.value(key), cst.SimpleString)
        unknown = True
        for known in origins(script, made.value):
            chosen, training, others = _entries(script, known)
            if not training:
                continue
            unknown = False
            if is_fixed and not _trains(script, key):
                calls += others or [chosen]
                continue
            train.append(chosen)
            calls += [chosen] if is_fixed else [chosen, *others]
            if not is_fixed and script.scope(made) is script.scope(loop.loop):
                when = f"{script.code(key)} == {training}"
        several = several or (unknown and not is_fixed and bool(loaders))
    pairs = ((other, _among(loaders, origins(script, other))) for other in _beside(script, loop))
    beside = tuple((other, made) for other, made in pairs if made)
    return Fed(loop, _among(loaders, calls), _among(loaders, train), when, several, beside)


def _beside(script: Script, loop: TrainLoop) -> list[cst.BaseExpression]:
    """Return the further iterables of a loop over `zip(a, cycle(b))`: b."""
    return [
        node.args[0].value
        if isinstance(node, cst.Call) and script.called(node) == "itertools.cycle"
        else node
        for node in zipped(script, loop.loop)
    ]


def _among(loaders: Sequence[cst.Call], nodes: Sequence[cst.CSTNode]) -> tuple[cst.Call, ...]:
    return tuple(call for call in loaders if any(call is node for node in nodes))


def _entries(
    script: Script, made: cst.BaseExpression
) -> tuple[cst.CSTNode, str, list[cst.CSTNode]]:
    """Return the loader for training in a dictionary, its key, and the other loaders.

    The key is "" if that is not certain.
    """
    if isinstance(made, cst.DictComp):
        phases = comprehension(script, made.value)
        return made.value, phases.training if phases is not None else "", []
    entries = made.elements if isinstance(made, cst.Dict) else ()
    known = [each for each in entries if isinstance(each, cst.DictElement)]
    keys = [each for each in known if _trains(script, each.key)]
    if len(keys) != 1:
        return made, "", []
    others = [s for each in known if each is not keys[0] for s in origins(script, each.value)]
    return origins(script, keys[0].value)[0], script.code(keys[0].key), [*others]


def _trains(script: Script, key: cst.BaseExpression) -> bool:
    text = script.value(key)
    return isinstance(text, cst.SimpleString) and bool(
        re.search("train", str(text.raw_value), re.IGNORECASE)
    )


def shard_loaders(plan: Plan, loaders: Loaders) -> None:
    """Add a sampler to each loader for training; the others keep all data on every rank."""
    for call in loaders.train:
        reason = _reason_against(plan.script, call)
        if reason:
            plan.todo(call, f"shard this loader: {reason}.")
        else:
            _shard(plan, call)
        if not loaders.certain and len(loaders.train) > 1:
            plan.todo(call, "if this loads test data, leave out its sampler.")
    for call in loaders.all:
        if loaders.train and call not in loaders.train:
            text = "Every rank tests on all of this, so metrics need no averaging."
            plan.step(8, text, call, once=True)
            _shuffle_alike(plan, call)


def _shuffle_alike(plan: Plan, call: cst.Call) -> None:
    """Let all ranks test in one order: means of batches, and decisions by them, depend on it.

    Not needed where all ranks draw equal numbers, in the training, too.
    """
    script = plan.script
    own = find(call, "sampler", 3)
    drawn = script.value(own.value) if own is not None else call
    if not unlike_ranks(script) or find(call, "generator") or not isinstance(drawn, cst.Call):
        return
    if shuffles(call) if drawn is call else DRAWS.match(script.called(drawn)):
        torch = script.name_of("torch") or "torch"
        made = f"None if hvd.size() == 1 else {torch}.Generator().manual_seed(0)"
        if drawn is call or find(drawn, "generator") is None:
            plan.add_argument(drawn, f"generator={made}")


def _reason_against(script: Script, call: cst.Call) -> str:
    own = find(call, "sampler", 3)
    is_none = own is None or dotted(script.value(own.value)) == "None"
    if find(call, "batch_sampler") or not (is_none or _own_sampler(script, call)):
        return "it has a sampler of its own"
    if any(a.star for a in call.args) and not (_always_shuffles(call) or _only_options(call)):
        return "its arguments are not written here"
    phases, data = comprehension(script, call), find(call, "dataset", 0)
    indexed = isinstance(data.value, cst.Subscript) and dotted(data.value.value) if data else ""
    plain = phases is not None and indexed and own is None and not options_of(call)
    around = (cst.CompFor, cst.Lambda, cst.BaseComp)
    if not plain and any(isinstance(a, around) for a in script.ancestors(call)):
        return "it is made in a comprehension"
    if _stream_of(script, call) is not None:
        return "an iterable data set has to divide itself among the ranks"
    return "" if find(call, "dataset", 0) is not None else "its data set is not written here"


def _own_sampler(script: Script, call: cst.Call) -> cst.Call | None:
    """Return the sampler of a loader, made beside it, that draws all data or a subset once."""
    own, data = find(call, "sampler", 3), find(call, "dataset", 0)
    made = script.value(own.value) if own is not None else None
    if not isinstance(made, cst.Call) or not REPLACED.match(script.called(made)):
        return None
    if data is None or len(made.args) != 1 or script.function(made) is not script.function(call):
        return None
    whole = script.code(made.args[0].value) == script.code(data.value)
    return made if whole or _draws_subset(script, made) else None


def _draws_subset(script: Script, sampler: cst.Call) -> bool:
    return script.called(sampler).endswith("SubsetRandomSampler")


def _always_shuffles(call: cst.Call) -> bool:
    """Return whether a call has `shuffle=True`, with which its `**options` have no sampler."""
    order = find(call, "shuffle", 2)
    always = order is not None and dotted(order.value) == "True"
    return always and all(arg.star != "*" for arg in call.args)


def _only_options(call: cst.Call) -> bool:
    """Return whether the order of a loader is in its `**options`, whose name is known."""
    return bool(options_of(call)) and find(call, "shuffle", 2) is None


def _stream_of(script: Script, call: cst.Call) -> cst.ClassDef | None:
    """Return the script's own class of a loader's data, if it is an iterable data set."""
    given = find(call, "dataset", 0)
    made = script.value(given.value) if given is not None else None
    for node in script.nodes:
        if isinstance(node, cst.ClassDef) and isinstance(made, cst.Call):
            bases = [script.qualified(arg.value) for arg in node.bases]
            if dotted(made.func) == node.name.value and any("IterableDataset" in b for b in bases):
                return node
    return None


def _shard(plan: Plan, call: cst.Call) -> None:
    script = plan.script
    given = find(call, "dataset", 0)
    assert given is not None
    name = script.target(call)
    stem = re.sub(r"_?(data)?_?(loader|dl|iter)$", "", name) or "train"
    stem = stem if stem not in ("self.", "self") else "self.train"
    stem = _fresh(plan, call, stem)
    data = script.code(given.value)
    lines = plan.comment(3, TEXT, call)
    phases = comprehension(script, call)
    if phases is not None:
        data = f"{data.partition('[')[0]}[{phases.training}]"
    elif not dotted(given.value):
        lines.append(f"{stem}_samples = {data}")
        data = f"{stem}_samples"
        plan.replace(given.value, data)
    sampler = f"{stem}_sampler"
    if _only_options(call):
        _shard_with_options(plan, call, lines, data, sampler, options_of(call))
        return
    if (own := _own_sampler(script, call)) is not None:
        _replace_sampler(plan, call, own, lines, data, stem)
        return
    order = find(call, "shuffle", 2)
    shuffle = script.code(order.value) if order is not None else "False"
    several, drawn = "hvd.size() > 1", shuffle
    if phases is not None and phases.variable in shuffle:
        drawn = "True"
    if len(script.calls_of(script.function(call))) > 1:  # for training and for tests
        if order is not None and _tells_training(script, order.value):
            several, drawn = f"{several} and {script.operand(order.value)}", "True"
        else:
            plan.todo(call, "if this also loads test data, shard only the training data.")
    plan.before(
        call,
        *lines,
        f"{sampler} = None",
        f"if {several}:",
        *_distributed(script, sampler, data, drawn),
    )
    if order is not None and shuffle != "False":
        alone = f"{sampler} is None"
        compared = isinstance(order.value, cst.Comparison)
        also = f"{alone} and {shuffle if compared else script.operand(order.value)}"
        plan.replace(order.value, alone if shuffle == "True" else also)
    own = f"{sampler} if {phases.is_training} else None" if phases is not None else sampler
    _give_sampler(plan, call, own)


def _tells_training(script: Script, order: cst.BaseExpression) -> bool:
    """Return whether a loader's function shuffles by its parameters: training data, not tests."""
    bound = script.binding(order) if dotted(order) else None
    if bound is not None and bound.how == "parameter":
        passed = (value or bound.value for value in script.passed(bound))
        return any(dotted(value) == "True" for value in passed)
    return isinstance(order, cst.Comparison)


def _distributed(script: Script, sampler: str, data: str, shuffle: str) -> list[str]:
    keep = "" if shuffle == "True" else f", shuffle={shuffle}"
    return [
        f"    {sampler} = {sampler_of(script)}(",
        f"        {data}, num_replicas=hvd.size(), rank=hvd.rank(){keep}",
        "    )",
    ]


def _replace_sampler(
    plan: Plan, call: cst.Call, own: cst.Call, lines: list[str], data: str, stem: str
) -> None:
    """On several ranks, put a distributed sampler in the place of a loader's own."""
    script = plan.script
    given, samples = find(call, "sampler", 3), find(call, "dataset", 0)
    assert given is not None and samples is not None
    sampler = dotted(given.value)  # the script may use its length, too
    if not sampler:
        sampler = f"{stem}_sampler"
        lines.append(f"{sampler} = {script.code(given.value)}")
        plan.replace(given.value, sampler)
    chosen = []
    if _draws_subset(script, own):
        torch = script.name_of("torch") or "torch"
        subset = f"{torch}.utils.data.Subset({data}, {script.code(own.args[0].value)})"
        if dotted(samples.value):
            lines.append(f"{stem}_samples = {data}")
            data = f"{stem}_samples"
            plan.replace(samples.value, data)
        chosen = [f"    {data} = {subset}"]
    shuffle = str(may_shuffle(script, call))
    made = _distributed(script, sampler, data, shuffle)
    plan.before(call, *lines, "if hvd.size() > 1:", *chosen, *made)


def _give_sampler(plan: Plan, call: cst.Call, sampler: str) -> None:
    """Pass a sampler to a loader, in the place of the None that it may have."""
    given = find(call, "sampler", 3)
    if given is None:
        plan.add_argument(call, f"sampler={sampler}")
    else:
        plan.replace(given.value, sampler)


def _fresh(plan: Plan, call: cst.Call, stem: str) -> str:
    """Return a prefix of names that the script, and other lines before the loader, do not use."""
    used = re.compile(rf"\b{re.escape(stem)}_(samples|sampler|options)\b")
    place = plan.script.offset((plan.script.line(plan.anchor(call)), 0))
    texts = [plan.script.text, *(e.text for e in plan.edits if e.start == place)]
    return _fresh(plan, call, f"{stem}_rank") if any(map(used.search, texts)) else stem


def _shard_with_options(
    plan: Plan, call: cst.Call, lines: list[str], data: str, sampler: str, options: str
) -> None:
    """Pass the sampler in a copy of the loader's options, which other loaders may share."""
    own = f"{sampler.removesuffix('_sampler')}_options"
    lines += [
        f"{own} = {options}",
        "if hvd.size() > 1:",
        f"    {sampler} = {sampler_of(plan.script)}(",
        f"        {data}, num_replicas=hvd.size(), rank=hvd.rank(),",
        f'        shuffle={options}.get("shuffle", False),',
        "    )",
        f'    {own} = {{**{options}, "shuffle": False, "sampler": {sampler}}}',
    ]
    plan.before(call, *lines)
    (given,) = (arg for arg in call.args if arg.star)
    plan.replace(given.value, own)


def set_epochs(plan: Plan, loaders: Loaders) -> None:
    """Let the samplers draw a new order in each epoch, equal on every rank."""
    script = plan.script
    is_set = False
    for each in loaders.fed:
        lines: list[str] = []
        for over, calls in ((iterable(script, each.loop.loop), each.calls), *each.beside):
            lines += _set_epoch(script, loaders, each, over, calls)
        if lines:
            is_set = True
            text = "A new order in each epoch, the same on every rank."
            plan.step(3, text, each.loop.loop, *lines)
    if not is_set and any(may_shuffle(script, call) for call in loaders.train):
        loop = loaders.fed[0].loop
        plan.todo(loop.loop, "sampler.set_epoch(epoch) before each epoch; else all have one order.")


def _set_epoch(
    script: Script,
    loaders: Loaders,
    fed: Fed,
    over: cst.BaseExpression | None,
    calls: Sequence[cst.Call],
) -> list[str]:
    """Return the lines that set the epoch of an iterable of a loop, if it may be shuffled."""
    shuffled = [c for c in calls if c in loaders.train and may_shuffle(script, c)]
    unseen = not calls and any(may_shuffle(script, c) for c in loaders.train)
    by_key = isinstance(over, cst.Subscript) and bool(fed.train)
    if not (shuffled or unseen) or over is None or not (dotted(over) or by_key):
        return []
    loader = script.code(over)
    epoch = _epoch(script, fed.loop) or f"{loader}.sampler.epoch + 1"
    test = "hvd.size() > 1" + (f" and {fed.when}" if fed.when else "")
    refused = any(_reason_against(script, c) for c in shuffled)  # and has no such sampler yet
    several = len(shuffled) < len(calls) and not fed.when
    if unseen or refused or several or fed.tests:  # the loader may be one for testing
        test = f'hasattr(getattr({loader}, "sampler", None), "set_epoch")'
    return [f"if {test}:", f"    {loader}.sampler.set_epoch({epoch})"]


def _epoch(script: Script, loop: TrainLoop) -> str:
    """Return the variable that counts epochs around a loop, "" if there is none."""
    outer, over = loop.epochs, iterable(script, loop.loop)
    by_key = isinstance(over, cst.Subscript) and isinstance(outer, cst.For)
    if by_key and dotted(outer.target) in names_in(over):  # a loop over phases in that over epochs
        outer = next(iter(script.loops(outer)), None)
    if isinstance(outer, cst.For) and isinstance(outer.target, cst.Name):
        over = iterable(script, outer)
        if script.called(over) == "range" or script.called(over).endswith("trange"):
            return outer.target.value
    function = script.function(loop.loop)
    if function is not None and not (outer and outer in script.ancestors(loop.loop)):
        for name in ("epoch", "epoch_index", "ep"):
            if any(b.how == "parameter" for b in script.bindings.get((function, name), ())):
                return name
    return ""
