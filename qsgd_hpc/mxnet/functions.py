"""Broadcast of parameters to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx

from qsgd_hpc.errors import UsageError
from qsgd_hpc.mxnet.ops import broadcast_
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any],
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace every parameter by root_rank's.

    A parameter whose shape gluon infers from the first batch is broadcast then.

    Args:
        params: ``net.collect_params()`` of gluon, or a dictionary of arrays, as returned by
            ``get_params()`` of a module.
        root_rank: the rank of the job whose values are copied.
        prefix: prefix of the operations' names, needed if several models train concurrently.
        process_set: the participating ranks; default: all.
    """
    if not isinstance(params, Mapping | mx.gluon.ParameterDict):
        raise UsageError(
            f"broadcast_parameters takes net.collect_params() or a dict of arrays, not a "
            f"{type(params).__name__}"
        )
    # By number, because gluon's names contain the number of layers created so far in this process.
    for number, key in enumerate(sorted(params.keys())):
        name = f"{prefix or ''}parameter.{number}"
        if isinstance(params[key], mx.gluon.Parameter):
            _broadcast_gluon(params[key], root_rank, name, process_set)
        else:
            broadcast_(params[key], root_rank, name, process_set=process_set)


def _broadcast_gluon(parameter: Any, root_rank: int, name: str, process_set: ProcessSet) -> None:
    def broadcast() -> None:
        for copy in parameter.list_data():
            broadcast_(copy, root_rank, name, process_set=process_set)

    try:
        parameter.list_data()
    except mx.gluon.parameter.DeferredInitializationError:
        _call_after_initialising(parameter, broadcast)
    else:
        broadcast()


def _call_after_initialising(parameter: Any, call: Any) -> None:
    initialise = parameter._init_impl

    def then_call(*arguments: Any, **options: Any) -> None:
        initialise(*arguments, **options)
        call()

    parameter._init_impl = then_call
