"""Loaders of PyTorch in a dictionary, one for each phase: `for x, y in loaders[phase]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from qsgd_hpc.eight_steps.convert.loops import TrainLoop, iterable, sources
from qsgd_hpc.eight_steps.reading import Script, dotted

__all__ = ["Fed", "Phases", "comprehension", "fed"]


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
    """

    loop: TrainLoop
    calls: tuple[cst.Call, ...]
    train: tuple[cst.Call, ...] = ()
    when: str = ""

    @property
    def tests(self) -> bool:
        """Whether the loop may also iterate over data that every rank has completely."""
        return len(self.calls) > 1 and not self.when


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


def fed(script: Script, loop: TrainLoop, loaders: Sequence[cst.Call]) -> Fed:
    """Return a training loop with its loaders."""
    over = iterable(script, loop.loop)
    calls: list[cst.CSTNode] = []
    train: list[cst.CSTNode] = []
    when = ""
    for made in sources(script, over) if over is not None else ():
        calls.append(made)
        if not isinstance(made, cst.Subscript) or not isinstance(made.slice[0].slice, cst.Index):
            continue
        key = made.slice[0].slice.value
        for known in sources(script, made.value):
            chosen, training, others = _entries(script, known)
            if not training:
                continue
            is_fixed = isinstance(script.value(key), cst.SimpleString)
            if is_fixed and not _trains(script, key):
                calls += others or [chosen]
                continue
            train.append(chosen)
            calls += [chosen] if is_fixed else [chosen, *others]
            if not is_fixed and script.scope(made) is script.scope(loop.loop):
                when = f"{script.code(key)} == {training}"
    return Fed(loop, _among(loaders, calls), _among(loaders, train), when)


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
    others = [s for each in known if each is not keys[0] for s in sources(script, each.value)]
    return sources(script, keys[0].value)[0], script.code(keys[0].key), [*others]


def _trains(script: Script, key: cst.BaseExpression) -> bool:
    text = script.value(key)
    return isinstance(text, cst.SimpleString) and bool(
        re.search("train", str(text.raw_value), re.IGNORECASE)
    )
