"""Export of TensorFlow graphs: this package's operations are replaced by their effect on one rank.

Such operations are only in graphs for training, and in batch normalisation over ranks. Names,
variables and signatures of the graphs are kept.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from qsgd_hpc import _core

__all__ = ["export_checkpoint", "export_saved_model"]

OWN = "Qsgd"
"""Prefix of the names of this package's operations."""

# Outputs of each operation: the first has one element per tensor, the others are single.
OUTPUTS = {
    "QsgdAllreduce": ("reduced",),
    "QsgdBroadcast": ("received",),
    "QsgdReducescatter": ("shares",),
    "QsgdAllgather": ("gathered", "rows"),
    "QsgdAlltoall": ("received", "rows"),
    "QsgdJoin": ("last",),
}


def export_saved_model(source: Path, target: Path) -> None:
    """Copy a SavedModel's folder with converted graphs."""
    shutil.copytree(source, target)
    # It belongs to the original graphs, and is optional.
    (target / "fingerprint.pb").unlink(missing_ok=True)
    file = target / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for meta_graph in model.meta_graphs:
        _clean(meta_graph)
    file.write_bytes(model.SerializeToString(deterministic=True))


def export_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, with a converted graph if TF1 has written one."""
    for file in source.parent.glob(f"{source.name}.*"):
        ending = file.name[len(source.name) :]
        copy = target.with_name(target.name + ending)
        if ending == ".meta":
            meta_graph = meta_graph_pb2.MetaGraphDef.FromString(file.read_bytes())
            _clean(meta_graph)
            copy.write_bytes(meta_graph.SerializeToString(deterministic=True))
        elif ending == ".index" or ending.startswith(".data-"):
            shutil.copyfile(file, copy)


def _clean(meta_graph: Any) -> None:
    """Replace this package's operations in a graph and its functions."""
    graph = meta_graph.graph_def
    numbers = itertools.count()
    added: list[Any] = []
    for node in graph.node:
        if node.op.startswith(OWN):
            added.append(_substitute(node, next(numbers)))
    for function in graph.library.function:
        offsets: dict[str, dict[str, int]] = {}
        for node in function.node_def:
            if node.op.startswith(OWN):
                offsets[node.name] = _offsets(node)
                added.append(_substitute(node, next(numbers)))
        _redirect(function, offsets)
    graph.library.function.extend(added)
    known = meta_graph.meta_info_def.stripped_op_list
    kept = [each for each in known.op if not each.name.startswith(OWN)]
    del known.op[:]
    known.op.extend(kept)


def _offsets(node: Any) -> dict[str, int]:
    """Return the first index of each of an operation's outputs, by name."""
    first, *rest = OUTPUTS[node.op]
    count = max(1, len(node.attr["T"].list.type))
    return {first: 0, **{name: count + i for i, name in enumerate(rest)}}


def _redirect(function: Any, offsets: dict[str, dict[str, int]]) -> None:
    """Rename references to the replaced nodes in a function.

    There, outputs of operations have names, but outputs of calls are ``output`` with an index.
    """

    def redirected(reference: str) -> str:
        name, *rest = reference.split(":")
        if name not in offsets:
            return reference
        output, index = rest
        return f"{name}:output:{offsets[name][output] + int(index)}"

    for node in function.node_def:
        node.input[:] = [redirected(reference) for reference in node.input]
    for result, reference in function.ret.items():
        function.ret[result] = redirected(reference)


def _substitute(node: Any, number: int) -> Any:
    """Replace a node by a call of its equivalent on one rank; return the called function."""
    types = [tf.dtypes.as_dtype(each) for each in node.attr["T"].list.type]
    operations = map(_core.Operation.of_text, node.attr["operations"].s.split())
    factors = [each.prescale * each.postscale for each in operations]
    inputs = [tf.TensorSpec(None, each) for each in types]
    if node.op == "QsgdAlltoall":
        inputs.append(tf.TensorSpec([None], tf.int64))
    traced = tf.function(_on_one_rank(node.op, factors)).get_concrete_function(*inputs)
    function = type(traced.function_def)()
    function.CopyFrom(traced.function_def)
    function.signature.name = f"on_one_rank_{number}"
    node.op = "PartitionedCall"
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.attr["f"].func.name = function.signature.name
    node.attr["Tin"].list.type.extend(each.dtype.as_datatype_enum for each in inputs)
    node.attr["Tout"].list.type.extend(each.dtype.as_datatype_enum for each in traced.outputs)
    return function


def _on_one_rank(kind: str, factors: Sequence[float]) -> Callable[..., list[Any]]:
    def scaled(*tensors: Any) -> list[Any]:
        return [
            tf.identity(x) if factor == 1 else x * tf.cast(factor, x.dtype)
            for x, factor in zip(tensors, factors, strict=True)
        ]

    def gathered(*tensors: Any) -> list[Any]:
        rows = [tf.shape(x, tf.int64)[0] for x in tensors]
        return [*(tf.identity(x) for x in tensors), tf.stack(rows)[:, tf.newaxis]]

    def exchanged(*tensors: Any) -> list[Any]:
        *data, splits = tensors
        return [*(tf.identity(x) for x in data), tf.reshape(splits, [len(data), -1])]

    def last() -> list[Any]:
        return [tf.constant(0, tf.int32)]

    special = {"QsgdAllgather": gathered, "QsgdAlltoall": exchanged, "QsgdJoin": last}
    return special.get(kind, scaled)
