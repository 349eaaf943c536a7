"""Equal parameters and averaged gradients, for the trainers of gluon and of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from qsgd_hpc.arrays._memory import ARRAYS
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import start_allreduce
from qsgd_hpc.frameworks.grouping import choose_groups, partition
from qsgd_hpc.frameworks.reduction import checked_reduction
from qsgd_hpc.mxnet.ops import broadcast_, on_host, view_of
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer", "DistributedTrainer", "broadcast_parameters"]


class _Gradients:
    """In-place averages of gradients over the ranks.

    Args:
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``, else no
            compression.
        predivide: gradients are divided by it before the sum, and by size / predivide after it.
        prefix: prefix of the operations' names.
        num_groups: number of groups in which gradients are reduced; 0 reduces each separately.
        process_set: the participating ranks.
    """

    def __init__(
        self,
        compression: Any,
        predivide: float,
        prefix: str,
        num_groups: int,
        process_set: ProcessSet,
    ) -> None:
        self._reduction = checked_reduction(
            compression=compression, predivide=predivide, process_set=process_set
        )
        self._prefix = prefix
        self._num_groups = choose_groups(num_groups, None)

    def average(self, gradients: Sequence[tuple[int, str, Any]]) -> None:
        """Average gradients, each given with its number and the parameter's name.

        Their order is equal on every rank.
        """
        handles = []
        for number, members in enumerate(partition(gradients, self._num_groups or len(gradients))):
            group = None
            if self._num_groups:
                group = ops.Group(f"{self._prefix}gradients.{number}", len(members))
            handles += [self._start(i, name, tensor, group) for i, name, tensor in members]
        Handle.together(handles).wait()

    def _start(self, number: int, parameter: str, tensor: Any, group: ops.Group | None) -> Handle:
        """Start replacing a gradient by the average; do not access it before the handle is done."""
        if tensor.stype != "default":
            raise UsageError(
                f"the gradient of '{parameter}' is {tensor.stype}; sparse gradients of MXNet are "
                "not reduced: build the layer with sparse_grad=False"
            )
        host = on_host(tensor)
        view = view_of(host)
        reduction = self._reduction
        handle = start_allreduce(
            ARRAYS,
            view,
            reduction,
            f"{self._prefix}gradient.{number}",
            group,
            coding=reduction.coding(parameter, view.shape, str(view.dtype)),
            check_finite=True,
            in_place=True,
        )
        return handle if host is tensor else handle.then(lambda _: host.copyto(tensor))


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon trainer whose ``step`` first averages the gradients over the ranks.

    Args:
        params: ``net.collect_params()``.
        optimizer: a name, or an optimizer of MXNet.
        optimizer_params: arguments of the optimizer; its learning rate is not scaled.
        compression: ``hvd.Compression.none``, ``fp16``, ``qsgd(bits=4)``...; None uses
            ``QSGD_BITS`` or ``QSGD_SCHEME``, else no compression.
        gradient_predivide_factor: gradients are divided by it before the sum and by size / factor
            after it.
        prefix: prefix of the operations' names, needed if several trainers run concurrently.
        num_groups: number of groups in which gradients are reduced; 0 reduces each separately.
        process_set: the participating ranks; default: all.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Any = None,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer.wrapped  # otherwise gradients would be averaged twice
        if not isinstance(optimizer, str):
            _require_optimizer(optimizer, "DistributedTrainer(params, optimizer)")
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._gradients = _Gradients(
            compression, gradient_predivide_factor, prefix or "", num_groups, process_set
        )

    def _allreduce_grads(self) -> None:
        """Average all gradients; gluon calls this in ``step`` and in ``allreduce_grads``."""
        trained = [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]
        # The last layer's gradients are ready first.
        self._gradients.average([(i, p.name, _only_gradient(p)) for i, p in trained[::-1]])


def _require_optimizer(optimizer: Any, call: str) -> None:
    if isinstance(optimizer, DistributedOptimizer) or not isinstance(
        optimizer, mx.optimizer.Optimizer
    ):
        raise UsageError(
            f"{call}: the optimizer is a {type(optimizer).__name__}; pass an optimizer of MXNet, "
            "such as mx.optimizer.SGD(learning_rate=0.01), which no trainer wraps"
        )


def _only_gradient(parameter: Any) -> Any:
    gradients = parameter.list_grad()
    if len(gradients) > 1:
        raise UsageError(
            f"parameter '{parameter.name}' is on {len(gradients)} devices; start a rank for each, "
            "and initialise with ctx=mx.gpu(hvd.local_rank())"
        )
    return gradients[0]


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer for ``Module`` whose updates first average the gradients over the ranks.

    Attributes are read from and written to the wrapped optimizer.

    Args:
        optimizer: an optimizer of MXNet.
        gradient_predivide_factor: this and the other arguments: see :class:`DistributedTrainer`.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        compression: Any = None,
    ) -> None:
        _require_optimizer(optimizer, "DistributedOptimizer(optimizer)")
        gradients = _Gradients(compression, gradient_predivide_factor, "", num_groups, process_set)
        arguments = gradient_predivide_factor, num_groups, process_set, compression
        own = {"wrapped": optimizer, "_gradients": gradients, "_arguments": arguments}
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def __reduce__(self) -> Any:
        return DistributedOptimizer, (self.wrapped, *self._arguments)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return the wrapped optimizer's state of a weight."""
        return self.wrapped.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return the wrapped optimizer's state of a 16-bit weight."""
        return self.wrapped.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients, then update the weights."""
        self._average(index, grad)
        self.wrapped.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients, then update 16-bit weights."""
        self._average(index, grad)
        self.wrapped.update_multi_precision(index, weight, grad, state)

    def _average(self, index: Any, grad: Any) -> None:
        pairs = [(index, grad)]
        if isinstance(index, Sequence):
            pairs = list(zip(index, grad, strict=True))
        names = self.wrapped.idx2name
        self._gradients.average([(i, names.get(i, str(i)), tensor) for i, tensor in pairs])


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
