"""The state of the hook: settings, process group, and residuals."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc import _core, env
from qsgd_hpc.compression import KINDS, Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS, Rule
from qsgd_hpc.torch._distributed import host_group, say, serves, why_on_host, why_unsupported
from qsgd_hpc.torch.amp import report_skipped_steps
from qsgd_hpc.torch.ddp.device import DevicePlan, Queue
from qsgd_hpc.torch.ddp.host import Pipeline, Plan, future_for, staged
from qsgd_hpc.torch.ddp.memory import Memory, Place, Unused

__all__ = ["QSGDState"]


class QSGDState:
    """State for ``model.register_comm_hook(state, qsgd_hook)``.

    Args:
        process_group: the process group of the model; None is the default group.
        bits: bits per element, including the sign, 1 to 8; 1 is the sign with a scale. None uses
            QSGD_BITS, where 32 sends all gradients exactly; else 4, or the fixed bits of the
            scheme.
        error_feedback: add the error of coding to the next gradient. Needs float32 host memory of
            the gradients' size, plus 1/n of it on n ranks.
        scheme: a code of docs/compression.md, such as qsgd, eden or topk.
        named_parameters: ``model.module.named_parameters()``, for rules and checkpoints by name.
        seed: seed of the rounding noise, equal on every rank; None uses QSGD_SEED.
        start_step: number of exact reductions of each parameter before compression begins.
        scaler: a ``GradScaler``, so that residuals follow its changes of scale.
        threads: number of threads that code a bucket; None uses QSGD_THREADS.
        **settings: ``bucket_size``, ``norm``, ``rounding``, ``min_elements``, ``rules`` and other
            settings of the scheme (:mod:`qsgd_hpc.compression`); if unset, QSGD_* are used.
    Raises:
        UsageError: a setting that is unknown or out of range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        bits: int | None = None,
        *,
        error_feedback: bool | None = True,
        scheme: str = "qsgd",
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        seed: int | None = None,
        start_step: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        threads: int | None = None,
        **settings: int | str | float | Iterable[Rule | tuple[str, int | str]] | None,
    ) -> None:
        self.process_group = process_group
        self._is_off = bits is None and env.get("QSGD_BITS") == PLAIN_BITS
        self.compression = _compression(scheme, bits, error_feedback, settings)
        self.seed = env.get("QSGD_SEED") if seed is None else seed
        self.start_step = start_step
        self.scaler = scaler
        self._scale = 1.0
        self._memory = Memory(named_parameters)
        self._threads = env.get("QSGD_THREADS") if threads is None else threads
        self._forget_group()
        report_skipped_steps(self)

    def name_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Name the parameters, which an unpickled state needs if they had names before.

        Args:
            named_parameters: ``model.module.named_parameters()``.
        """
        self._memory.name(named_parameters)

    def _forget_group(self) -> None:
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._place: Place | None = None
        self._host_code_group: Any = None
        self._pipeline: Pipeline | None = None
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._device_plans: dict[tuple[Any, ...], DevicePlan] = {}
        self._queues: dict[torch.device, Queue] = {}
        self._unused = Unused()
        self.arrivals: list[tuple[float, int]] = []
        """Of each bucket of the latest backward pass: when it was ready (s), and its elements."""

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a ``dist.GradBucket`` over the ranks; does not block.

        Returns:
            a future of the bucket's buffer, the same bits on every rank.
        """
        flat, place = bucket.buffer(), self._join_group()
        if bucket.index() == 0:
            self.arrivals.clear()
        if flat.is_cpu:  # the host does not know when a device has computed a bucket
            self.arrivals.append((time.perf_counter(), flat.numel()))
        if place.size == 1:
            alone = future_for(flat)
            alone.set_result(flat)
            return alone
        self._follow_scale(bucket)
        parameters = bucket.parameters()
        exact = self._is_off or any(
            self._memory.slot(p).steps < self.start_step for p in parameters
        )
        key = (exact, flat.dtype, *map(id, parameters))
        planned = parameters, flat, None if exact else self.compression, self._memory, place
        if (library := serves(flat.device, self.compression, self._group())) is not None:
            if key not in self._device_plans:
                self._count_steps()  # plans of other buckets may have counted steps of these
                _drop_other_layouts(self._device_plans, key)
                queue = self._queues.setdefault(flat.device, Queue(flat.device))
                self._device_plans[key] = DevicePlan(*planned, queue, library)
            self._watch_unused(bucket, flat)
            return self._device_plans[key].start(flat, self._group())
        pipeline = self._start_pipeline(flat.device)
        if key not in self._plans:
            _drop_other_layouts(self._plans, key)
            self._plans[key] = Plan(*planned)
        self._watch_unused(bucket, flat)
        plan = self._plans[key]
        return pipeline.submit(plan, staged(flat, plan.pinned), future_for(flat))

    def belongs_to(self, model: DistributedDataParallel) -> None:
        """Note the model, whose settings spare work on parameters that are always used."""
        self._model = weakref.ref(model)

    def leave(self, bucket: Any) -> None:
        """Note a bucket that is averaged elsewhere; it may be the first or last of a pass."""
        self._follow_scale(bucket)
        self._watch_unused(bucket, None)

    def _watch_unused(self, bucket: Any, flat: torch.Tensor | None) -> None:
        model = None if self._model is None else self._model()
        if model is None or model.find_unused_parameters or model.static_graph:
            self._unused.watch(bucket, flat, self._memory)

    def require_transport(self, gradient: torch.Tensor) -> None:
        """Ensure that buckets on this gradient's device can be sent; collective over the group.

        Raises:
            UsageError: neither kernels nor the host can code them for this process group.
        """
        if serves(gradient.device, self.compression, self._group()) is None:
            self._host_group()

    def _group(self) -> Any:
        return self.process_group or dist.group.WORLD

    def _host_group(self) -> Any:
        """Return the group that sends codes from host memory."""
        if self._host_code_group is None:
            self._host_code_group = host_group(self._group())
        return self._host_code_group

    def _join_group(self) -> Place:
        if self._place is None:
            if not dist.is_initialized():
                raise UsageError("QSGDState: call torch.distributed.init_process_group() first")
            group = self._group()
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            if rank < 0:
                raise UsageError(
                    f"rank {dist.get_rank()} is not in the process group of its QSGDState; pass "
                    "the state the model's group: model.process_group"
                )
            self._place = Place(rank, size, self.seed, _core.Workers(self._threads))
        return self._place

    def _start_pipeline(self, device: torch.device) -> Pipeline:
        if self._pipeline is None:
            if device.type != "cpu":
                reason = why_on_host(device, self.compression, self._group())
                say(f"DDP's gradients on {device} are coded in pinned host memory: {reason}")
            self._pipeline = Pipeline(self._host_group())
        return self._pipeline

    def _count_steps(self) -> None:
        for plan in self._device_plans.values():
            plan.count()

    def _follow_scale(self, bucket: Any) -> None:
        # The scale changes between steps only, and reading it waits for the device.
        if bucket.index() != 0:
            return
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        if scale != self._scale:
            self._memory.rescale(scale / self._scale)
            self._scale = scale

    def forget_skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the residuals of parameters whose optimizer the scaler has made skip a step."""
        self._memory.forget(parameters)

    @property
    def bits(self) -> int | None:
        """Bits per element of large gradients; 32 without compression, None if not one number."""
        return PLAIN_BITS if self._is_off else getattr(self.compression, "bits", None)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of codes and exact gradients that this rank has sent to others so far.

        None if buckets stay on a device, where bytes are not counted.
        """
        if self._device_plans:
            return None
        return 0 if self._pipeline is None else self._pipeline.sent_bytes

    @property
    def coding_s(self) -> float:
        """Seconds for which this rank has encoded, added and decoded on the host so far."""
        return 0.0 if self._pipeline is None else self._pipeline.coding_s

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit; call it between two steps.

        It is specific to this rank and to the number of ranks; :meth:`global_state_dict` is for any
        number.

        Returns:
            ``parameters`` by name: ``steps``, and with error feedback ``residual`` and
            ``owner_residual`` (float32); and ``scale``, that of the gradients.
        """
        self._count_steps()
        return {"scale": self._scale, "parameters": self._memory.state_dict()}

    def global_state_dict(self) -> dict[str, Any]:
        """Return the state that a run on any number of ranks needs to resume; collective.

        No part of the gradients is lost, but the rounding noise differs from then on.

        Returns:
            the same on every rank: ``parameters`` by name: ``steps``, and with error feedback
            ``owed`` (float32, shape (elements,)), the accumulated error of the means; and
            ``scale``.
        """
        self._count_steps()
        size = self._join_group().size

        def sum_up(residual: torch.Tensor) -> None:
            coded_here = why_unsupported(self._group(), residual.device) is not None
            group = self._host_group() if coded_here else self._group()
            dist.all_reduce(residual, group=group)

        parameters = self._memory.global_state_dict(size, sum_up)
        return {"scale": self._scale, "parameters": parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state of this rank, or a global one; call it between two steps."""
        self._scale = state["scale"]
        self._memory.load_state_dict(state["parameters"])
        self._plans.clear()
        self._device_plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude objects of the process: groups, threads, parameters, the scaler."""
        kept = ("compression", "seed", "start_step", "_threads", "_is_off")
        own = {k: getattr(self, k) for k in kept}
        return own | {"state": self.state_dict(), "named": self._memory.named}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        state, named = saved.pop("state"), saved.pop("named", False)
        self.__dict__.update(saved, process_group=None, scaler=None, _memory=Memory(None, named))
        self._forget_group()
        report_skipped_steps(self)
        self.load_state_dict(state)


def _drop_other_layouts(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...]) -> None:
    """Drop the plans, and with them the memory, of buckets that DDP has rebuilt into others.

    Exact plans of the same buckets stay: a captured graph may use them.
    """
    parameters = set(key[2:])
    for old in [k for k in plans if k[2:] != key[2:] and not parameters.isdisjoint(k[2:])]:
        del plans[old]


def _compression(
    scheme: str, bits: int | None, error_feedback: bool | None, settings: Mapping[str, Any]
) -> Lossy:
    """Return the code; QSGD_BITS does not apply to a scheme that has fixed bits."""
    if scheme not in KINDS:
        raise UsageError(f"QSGDState(scheme={scheme!r}): choose one of {', '.join(KINDS)}")
    kind = KINDS[scheme]
    chosen: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
    chosen["nmse_budget"] = None
    variable = env.get("QSGD_BITS")
    if bits is not None:
        chosen["bits"] = bits
    elif variable not in (None, AUTO_BITS, PLAIN_BITS) and "bits" in kind.__dataclass_fields__:
        chosen["bits"] = variable
    try:
        compression = kind(error_feedback=error_feedback, **chosen)
    except TypeError as error:
        known = [f for f in kind.__dataclass_fields__ if f != "nmse_budget"]
        raise UsageError(f"QSGDState: {error}; {scheme} takes {', '.join(known)}") from None
    compression.require_fixed_length("QSGDState")
    return compression
