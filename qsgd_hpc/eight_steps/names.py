"""Bindings of names in a script: imports, assignments, parameters, loops and definitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import libcst as cst

__all__ = [
    "Binding",
    "How",
    "Import",
    "bindings",
    "dotted",
    "has_own_rate",
    "imports",
    "is_optimizer_name",
    "is_scheduler",
    "names_in",
    "receiver",
    "targets",
]

_OPTIMIZER = re.compile(r"(^|\.)(opt|optim|optimi[sz]er)(_(?!.*sched)\w+)?$")

How = Literal["import", "assign", "part", "with", "for", "parameter", "function", "class"]


@dataclass(frozen=True, eq=False)
class Binding:
    """One binding of a name to a value.

    Attributes:
        name: the name bound, or "self.name".
        how: kind of binding; "part": an element of an unpacked value, "for": of an iterable.
        at: the node after whose end the name is bound.
        value: the expression bound, iterated over (for), entered (with) or unpacked (part).
        imported: the dotted name imported, if an import binds it.
        index: the position in the unpacked value or among the parameters; -1 after a star.
    """

    name: str
    how: How
    at: cst.CSTNode
    value: cst.BaseExpression | None = None
    imported: str = ""
    index: int = 0


@dataclass(frozen=True, eq=False)
class Import:
    """One imported module: its full name, and its name in the script.

    Attributes:
        module: "horovod.torch" for `import horovod.torch as hvd`, `import horovod.torch` and
            `from horovod import torch`; "torch" for `from torch import nn`.
        alias: "hvd", "horovod.torch" and "torch"; "" if only names from it are bound.
        node: the import.
    """

    module: str
    alias: str
    node: cst.CSTNode


def dotted(node: cst.CSTNode | None) -> str:
    """Return "a.b.c" for a name or an attribute of names, else ""."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def receiver(node: cst.CSTNode | None, *methods: str) -> cst.BaseExpression | None:
    """Return x if a node is the call `x.method(...)` of one of these methods, of any without."""
    func = node.func if isinstance(node, cst.Call) else None
    if isinstance(func, cst.Attribute) and (not methods or func.attr.value in methods):
        return func.value
    return None


def names_in(node: cst.CSTNode) -> set[str]:
    """Return the names that an expression reads, including dotted ones."""
    if isinstance(node, cst.Attribute):
        return ({dotted(node)} | names_in(node.value)) - {""}
    if isinstance(node, cst.Name):
        return {node.value}
    if isinstance(node, cst.Arg):
        return names_in(node.value)
    return {name for child in node.children for name in names_in(child)}


def is_scheduler(name: str) -> bool:
    """Return whether a full name is that of a scheduler of torch.optim, not of an optimizer."""
    return name.startswith(("torch.optim.lr_scheduler.", "torch.optim.swa_utils."))


def has_own_rate(called: str) -> bool:
    """Return whether an optimizer finds the length of its steps itself, at any number of samples.

    Args:
        called: the qualified name of its class.
    """
    return called.rpartition(".")[2] == "LBFGS"


def is_optimizer_name(node: cst.CSTNode) -> bool:
    """Return whether a name, or an attribute of names, is one that scripts give to optimizers."""
    return bool(_OPTIMIZER.search(dotted(node)))


def origin_of(node: cst.ImportFrom) -> str:
    """Return the module of a from-import, with a leading dot for each level of a relative one."""
    return "." * len(node.relative) + dotted(node.module)


def bound_by_import(node: cst.Import | cst.ImportFrom) -> Iterator[Binding]:
    if isinstance(node.names, cst.ImportStar):
        return
    for alias in node.names:
        name = dotted(alias.name)
        bound = alias.evaluated_alias
        if isinstance(node, cst.ImportFrom):
            origin = origin_of(node)
            joint = "" if not origin or origin.endswith(".") else "."
            yield Binding(bound or name, "import", alias, imported=f"{origin}{joint}{name}")
        else:
            first = name.partition(".")[0]
            yield Binding(bound or first, "import", alias, imported=name if bound else first)


def targets(
    target: cst.BaseExpression,
    value: cst.BaseExpression | None,
    how: How,
    at: cst.CSTNode,
    index: int = 0,
) -> Iterator[Binding]:
    """Yield the bindings of an assignment to `target`; tuples are split into elements."""
    if isinstance(target, (cst.Tuple, cst.List)):
        given = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
        whole = how == "assign" and len(given) == len(target.elements)
        starred = False
        for place, element in enumerate(target.elements):
            starred = starred or isinstance(element, cst.StarredElement)
            if whole and not starred:
                yield from targets(element.value, given[place].value, how, at)
            else:
                part: How = "part" if how == "assign" else how
                yield from targets(element.value, value, part, at, -1 if starred else place)
    elif isinstance(target, cst.Name) or dotted(target).count(".") == 1:
        yield Binding(dotted(target), how, at, value, index=index)


def bound_by_parameters(node: cst.FunctionDef | cst.Lambda) -> Iterator[Binding]:
    p = node.params
    for index, parameter in enumerate((*p.posonly_params, *p.params)):
        yield Binding(parameter.name.value, "parameter", parameter, parameter.default, index=index)
    rest = [*p.kwonly_params, p.star_kwarg, p.star_arg]
    for other in rest:
        if isinstance(other, cst.Param):
            yield Binding(other.name.value, "parameter", other, other.default, index=-1)


def bound_by_assignment(node: cst.Assign) -> Iterator[Binding]:
    for each in node.targets:
        yield from targets(each.target, node.value, "assign", node)


def bound_by_value(node: cst.AnnAssign | cst.NamedExpr) -> Iterator[Binding]:
    if node.value is not None:
        yield from targets(node.target, node.value, "assign", node)


def bound_by_loop(node: cst.For | cst.CompFor) -> Iterator[Binding]:
    yield from targets(node.target, node.iter, "for", node.target)


def bound_by_with(node: cst.WithItem) -> Iterator[Binding]:
    if node.asname is not None:
        yield from targets(node.asname.name, node.item, "with", node)


# The bindings that a node of each type makes in its scope (not those of parameters). A table,
# because most nodes bind nothing, and isinstance() would ask for one type after the other.
_BOUND_BY: dict[type[cst.CSTNode], Callable[[Any], Iterable[Binding]]] = {
    cst.Import: bound_by_import,
    cst.ImportFrom: bound_by_import,
    cst.Assign: bound_by_assignment,
    cst.AnnAssign: bound_by_value,
    cst.NamedExpr: bound_by_value,
    cst.For: bound_by_loop,
    cst.CompFor: bound_by_loop,
    cst.WithItem: bound_by_with,
    cst.FunctionDef: lambda node: [Binding(node.name.value, "function", node)],
    cst.ClassDef: lambda node: [Binding(node.name.value, "class", node)],
}


def bindings(
    nodes: Iterable[cst.CSTNode],
    scope_of: Callable[[cst.CSTNode], cst.CSTNode],
    class_of: Callable[[cst.CSTNode], cst.CSTNode | None],
) -> dict[tuple[cst.CSTNode, str], tuple[Binding, ...]]:
    """Return the bindings of each name of each scope, in the order of the text.

    `self.name` belongs to the class whose method it is assigned in.
    """
    found: dict[tuple[cst.CSTNode, str], list[Binding]] = {}
    for node in nodes:
        bound_by = _BOUND_BY.get(type(node))
        for binding in bound_by(node) if bound_by else ():
            scope = class_of(node) if binding.name.startswith("self.") else scope_of(node)
            if scope is not None:
                found.setdefault((scope, binding.name), []).append(binding)
        if type(node) is cst.FunctionDef or type(node) is cst.Lambda:
            for binding in bound_by_parameters(node):
                found.setdefault((node, binding.name), []).append(binding)
    return {key: tuple(several) for key, several in found.items()}


def imports(nodes: Iterable[cst.CSTNode]) -> tuple[Import, ...]:
    """Return the modules imported, also inside functions, in the order of the text."""
    found: list[Import] = []
    for node in nodes:
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = dotted(alias.name)
                found.append(Import(name, alias.evaluated_alias or name, node))
        elif isinstance(node, cst.ImportFrom):
            origin = origin_of(node)
            found.append(Import(origin, "", node))
            if not isinstance(node.names, cst.ImportStar):
                for binding in bound_by_import(node):
                    found.append(Import(binding.imported, binding.name, node))
    return tuple(found)
