"""Queries on calls and statements for the rules of all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from qsgd_hpc.eight_steps.reading import Script, dotted

__all__ = [
    "argument_node", "body_of", "find", "inside", "is_literal", "last_with_call",
    "name_of_module", "names_in", "position_of", "short_name", "target_of", "walk",
]  # fmt: skip


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all inside of it."""
    yield node
    for child in node.children:
        yield from walk(child)


def names_in(node: cst.CSTNode) -> set[str]:
    """Return the names that an expression reads, including dotted ones."""
    if isinstance(node, cst.Attribute):
        return ({dotted(node)} | names_in(node.value)) - {""}
    if isinstance(node, cst.Name):
        return {node.value}
    if isinstance(node, cst.Arg):
        return names_in(node.value)
    return {name for child in node.children for name in names_in(child)}


def inside(script: Script, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
    """Return whether a node is part of another."""
    return any(each is outer for each in script.ancestors(node))


def find(call: cst.Call, name: str, index: int = -1) -> cst.Arg | None:
    """Return the argument with this name, or at this position, from 0."""
    for place, each in enumerate(call.args):
        if each.keyword is not None and each.keyword.value == name:
            return each
        if each.star:
            return None
        if each.keyword is None and place == index:
            return each
    return None


def argument_node(call: cst.Call, name: str, index: int = -1) -> cst.BaseExpression | None:
    """Return the value of an argument, or None."""
    found = find(call, name, index)
    return found.value if found is not None else None


def is_literal(node: cst.CSTNode | None) -> bool:
    """Return whether an expression is a literal number."""
    if isinstance(node, cst.UnaryOperation):
        node = node.expression
    return isinstance(node, cst.Integer | cst.Float)


def target_of(script: Script, node: cst.CSTNode) -> str:
    """Return the name (or `self.name`) that a complete expression is assigned to, or ""."""
    parent = script.parents.get(node)
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
        name = dotted(parent.targets[0].target)
    elif isinstance(parent, cst.AnnAssign):
        name = dotted(parent.target)
    else:
        return ""
    return name if "." not in name or name.startswith("self.") else ""


def short_name(script: Script, call: cst.Call) -> str:
    """Return the last part of the called function's name: "Adam" for torch.optim.Adam."""
    return script.called(call).rpartition(".")[2]


def body_of(script: Script, statement: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """Return the statements of the block that a statement is in."""
    parent = script.parents.get(statement)
    body = getattr(parent, "body", ())
    return body if isinstance(body, Sequence) else ()


def position_of(script: Script, node: cst.CSTNode, body: Sequence[cst.CSTNode]) -> int:
    """Return the index of the statement of a block that contains a node, or -1."""
    around = [node, *script.ancestors(node)]
    return next((i for i, each in enumerate(body) if any(each is a for a in around)), -1)


def last_with_call(
    script: Script, first: cst.CSTNode, suffix: str, until: Iterable[cst.CSTNode] = ()
) -> cst.CSTNode:
    """Return the last statement of a block with a call of this name; ``first`` if none follows it.

    Loops are passed over: the training loop may restore a state, too.

    Args:
        script: the script.
        first: a statement; those before it are not searched.
        suffix: the end of the called name.
        until: nodes that train; statements behind the first of them are not searched.
    """
    body = body_of(script, first)
    last = position_of(script, first, body)
    training = (position_of(script, node, body) for node in until)
    end = min((index for index in training if index > last), default=len(body))
    for call in script.calls:
        if script.called(call).endswith(suffix):
            index = position_of(script, call, body)
            if last < index < end and not isinstance(body[index], cst.For | cst.While):
                last = index
    return body[last] if last >= 0 else first


def name_of_module(script: Script, module: str) -> str:
    """Return the name by which the script calls a module, or ""."""
    for each in script.imports:
        if each.module == module and each.alias:
            return each.alias
    aliases: Iterable[str] = (each.alias for each in script.imports)
    return module if any(alias.startswith(f"{module}.") for alias in aliases) else ""
