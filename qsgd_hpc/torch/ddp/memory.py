"""State of the hook for each parameter: name, steps, residuals, and its place in a bucket."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsgd_hpc import _core
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch._distributed import HOST
from qsgd_hpc.torch.ops._tensors import name_of
from qsgd_hpc.torch.parameters import plain_name

__all__ = ["Memory", "Place", "Slot", "Unused", "bucket_tensor", "gradients_of"]

Saved = dict[str, dict[str, Any]]
_RESIDUALS = ("residual", "owner_residual", "owed")


@dataclass
class Slot:
    """One parameter's state. Residuals are float32 on the coder's device; None without feedback."""

    name: str
    steps: int = 0
    residual: torch.Tensor | None = None
    """Residual of this rank's own codes, shape (elements,)."""
    owner_residual: torch.Tensor | None = None
    """Residual of the means that this rank codes as an owner, shape (owned elements,)."""
    owned: tuple[int, int] = (0, 0)
    """Range of the owned elements: the first, and one past the last."""
    owed: torch.Tensor | None = None
    """Residual of the means from a global state, shape (elements,); owners apply their parts."""

    @property
    def id(self) -> int:
        """Return the number that keys the noise; equal on every rank."""
        return zlib.crc32(self.name.encode())

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return the existing residuals by their names."""
        found = {name: getattr(self, name) for name in _RESIDUALS}
        return {name: residual for name, residual in found.items() if residual is not None}


class Memory:
    """The slots of all parameters that have been reduced, in any bucket.

    Args:
        named_parameters: names for rules and checkpoints; None numbers the parameters in the order
            of their first reduction, which is the same on every rank and in every run of a model.
        named: whether the parameters have names, also if these are not known yet.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None, named: bool = False
    ) -> None:
        self._names = {p: plain_name(name) for name, p in named_parameters or ()}
        self.named = named or bool(self._names)
        self._slots: dict[torch.Tensor, Slot] = {}
        self._saved: Saved = {}

    def name(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Name parameters that have not been reduced yet."""
        self._names |= {p: plain_name(name) for name, p in named_parameters}
        self.named = True

    def slot(self, parameter: torch.Tensor) -> Slot:
        """Return the parameter's slot, with the values of a checkpoint for its name.

        Raises:
            UsageError: the names of an unpickled state are not known yet.
        """
        if parameter not in self._slots:
            if self.named and not self._names:
                raise UsageError(
                    "this QSGDState was pickled with names of parameters, which it needs for its "
                    "residuals and rules: call "
                    "state.name_parameters(model.module.named_parameters()) first"
                )
            name = self._names.get(parameter, str(len(self._slots)))
            slot = Slot(name, **self._saved.pop(name, {}))
            self._slots[parameter] = slot
        return self._slots[parameter]

    @staticmethod
    def allocate(
        slot: Slot,
        count: int,
        coding: Coding | None,
        *,
        rank: int,
        size: int,
        device: torch.device,
    ) -> None:
        """Allocate the residuals that a slot's coding needs, in the device's memory.

        Raises:
            UsageError: a checkpoint's residuals have another size, because its ranks or shapes
                were different.
        """
        if coding is None or not coding.error_feedback:
            return
        begin, end = _core.owned_elements(count, spec=coding.spec, id=slot.id, size=size, rank=rank)
        slot.owned = begin, end
        slot.residual = _kept(slot, slot.residual, count, device)
        slot.owner_residual = _kept(slot, slot.owner_residual, end - begin, device)
        # A rank adds its own input uncoded to the sums of the elements that it owns, so these have
        # no coding error. A residual there is from a different partition of the tensor; the owner
        # applies it.
        mine = slot.residual[begin:end]
        slot.owner_residual += mine / size
        mine.zero_()
        if slot.owed is not None:
            slot.owner_residual += _kept(slot, slot.owed, count, device)[begin:end]
            slot.owed = None

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set the residuals of parameters to zero; those of other models are ignored."""
        for parameter in parameters:
            if (slot := self._slots.get(parameter)) is not None:
                for residual in slot.residuals().values():
                    residual.zero_()

    def rescale(self, factor: float) -> None:
        """Multiply all residuals after a change of the gradients' scale."""
        for slot in self._slots.values():
            for residual in slot.residuals().values():
                residual.mul_(factor)
        for saved in self._saved.values():
            for name in saved.keys() & set(_RESIDUALS):
                saved[name].mul_(factor)

    def state_dict(self) -> Saved:
        """Return this rank's copies by name, on the host."""
        state = dict(self._saved)
        for slot in self._slots.values():
            state[slot.name] = {"steps": slot.steps} | {
                name: residual.to("cpu", copy=True) for name, residual in slot.residuals().items()
            }
        return state

    def global_state_dict(self, size: int, sum_up: Callable[[torch.Tensor], None]) -> Saved:
        """Return copies by name that are the same on every rank.

        Args:
            size: number of ranks that reduce together.
            sum_up: replaces a tensor by its sum over these ranks.
        Raises:
            UsageError: a rank's own state was loaded and has not been used yet.
        """
        for name, saved in self._saved.items():
            if "residual" in saved:
                raise UsageError(
                    f"parameter {name!r} has not been reduced since load_state_dict(), and the "
                    "loaded state is this rank's only; take a step first"
                )
        state = dict(self._saved)
        for slot in sorted(self._slots.values(), key=lambda slot: slot.name):
            state[slot.name] = {"steps": slot.steps}
            owed = slot.owed
            if slot.residual is not None and slot.owner_residual is not None:
                owed = slot.residual / size
                owed[slice(*slot.owned)] += slot.owner_residual
                sum_up(owed)
            if owed is not None:
                state[slot.name]["owed"] = owed.to("cpu", copy=True)
        return state

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Replace all slots; each uses its part when its parameter is next reduced."""
        # Keep numbers given so far, because DDP changes the order of buckets after the first step.
        self._names |= {parameter: slot.name for parameter, slot in self._slots.items()}
        self._slots.clear()
        known = set(self._names.values())
        state = {plain_name(name): saved for name, saved in state.items()}
        if known and state and known.isdisjoint(state):
            raise UsageError(
                f"the loaded state has parameters such as {next(iter(state))!r}, this QSGDState "
                f"such as {min(known)!r}: create it with the same named_parameters, such as "
                "model.module.named_parameters(), which compress() uses"
            )
        state = {name: saved for name, saved in state.items() if not known or name in known}
        self._saved = {name: _copied(saved) for name, saved in state.items()}


@dataclass(frozen=True)
class Place:
    """The position of this rank in the group, and the coding resources."""

    rank: int
    size: int
    seed: int
    workers: _core.Workers


def gradients_of(
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
    compression: Lossy | None,
    memory: Memory,
    place: Place,
    device: torch.device = HOST,
) -> Iterator[tuple[Slot, int, int, Coding | None]]:
    """Yield the slot, first element, size and coding of each gradient; allocates residuals."""
    at = 0
    for parameter in parameters:
        slot, count = memory.slot(parameter), parameter.numel()
        coding = None
        if compression is not None:
            coding = compression.coding_for_gradient(slot.name, parameter.shape, name_of(dtype))
        memory.allocate(slot, count, coding, rank=place.rank, size=place.size, device=device)
        yield slot, at, count, coding
        at += count


def bucket_tensor(slot: Slot, at: int, count: int, coding: Coding | None) -> _core.BucketTensor:
    """Return the core's description of a gradient that begins at element ``at`` of the bucket."""
    spec, residuals = None if coding is None else coding.spec, {}
    if spec is not None and slot.residual is not None and slot.owner_residual is not None:
        residuals["residual"] = slot.residual.data_ptr()
        residuals["owner_residual"] = slot.owner_residual.data_ptr()
    return _core.BucketTensor(at=at, count=count, id=slot.id, spec=spec, **residuals)


def _copied(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}


def _kept(
    slot: Slot, residual: torch.Tensor | None, count: int, device: torch.device
) -> torch.Tensor:
    if residual is None:
        return torch.zeros(count, dtype=torch.float32, device=device)
    if residual.numel() == count:
        return residual.to(device, torch.float32)
    raise UsageError(
        f"parameter {slot.name!r}: the loaded state has a residual of {residual.numel()} "
        f"elements, {count} are needed. Load on each rank the state_dict() of the same rank, "
        "from a run with the same number of ranks, model and compression; a "
        "global_state_dict() fits any number of ranks"
    )


_Sent = tuple[torch.Tensor, int, Slot, torch.Tensor, int]


class Unused:
    """Returns means that DDP discards to the residuals of the elements' owners.

    With ``find_unused_parameters``, DDP averages zeros for a parameter without a gradient on any
    rank in a step, and leaves its ``grad`` as it is. Coding adds the residuals to these zeros, so
    the mean is what the ranks still owed, and without a correction it would be lost.
    """

    def __init__(self) -> None:
        self._sent: list[_Sent] = []

    def watch(self, bucket: Any, flat: torch.Tensor | None, memory: Memory) -> None:
        """Remember the gradients of a bucket until its backward pass ends."""
        if torch._C._current_graph_task_id() == -1:  # Join sends zeros for a rank that has ended
            return
        if bucket.index() == 0:
            self._sent = []  # of a pass that failed
        if flat is not None:
            at = 0
            for parameter in bucket.parameters():
                slot = memory.slot(parameter)
                if slot.owner_residual is not None:
                    self._sent.append((parameter, _version(parameter), slot, flat, at))
                at += parameter.numel()
        if bucket.is_last():
            sent, self._sent = self._sent, []
            # DDP's own callback, which writes the gradients, is queued after this hook.
            last = functools.partial(_after_callbacks, functools.partial(_keep_discarded, sent))
            _after_callbacks(last)


def _after_callbacks(act: Any) -> None:
    """Call ``act`` after the callbacks that the running backward pass has queued."""
    torch.autograd.Variable._execution_engine.queue_callback(act)  # type: ignore[attr-defined]


def _keep_discarded(sent: list[_Sent]) -> None:
    for parameter, version, slot, flat, at in sent:
        # Equal versions: nothing was written to the gradient, unless it is a view of the bucket.
        if version != _version(parameter) or _is_view_of(parameter.grad, flat):
            continue
        begin, end = slot.owned
        assert slot.owner_residual is not None
        slot.owner_residual += flat[at + begin : at + end].to(slot.owner_residual.device)


def _version(parameter: torch.Tensor) -> int:
    """Return the number of changes of the gradient; -1 if there is none."""
    return -1 if parameter.grad is None else parameter.grad._version


def _is_view_of(gradient: torch.Tensor | None, flat: torch.Tensor) -> bool:
    return gradient is not None and (
        gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    )
