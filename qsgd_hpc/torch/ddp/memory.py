"""What the hook remembers of each parameter: its name, its steps, and what coding has left over."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qsgd_hpc import _core
from qsgd_hpc.compression import Coding
from qsgd_hpc.errors import UsageError

__all__ = ["Memory", "Slot"]

_HOST = torch.device("cpu")


@dataclass
class Slot:
    """One parameter. Residuals are float32, where codes are made, None without error feedback."""

    name: str
    steps: int = 0
    residual: torch.Tensor | None = None
    """What this rank's own codes have left over, shape (elements,)."""
    owner_residual: torch.Tensor | None = None
    """The same of the means that this rank codes for all, shape (owned elements,)."""

    @property
    def id(self) -> int:
        """Return the number that keys the noise; equal on every rank."""
        return zlib.crc32(self.name.encode())

    def residuals(self) -> list[torch.Tensor]:
        """Return those that exist."""
        return [r for r in (self.residual, self.owner_residual) if r is not None]


class Memory:
    """The slots of all parameters that have been reduced, whatever bucket they came in.

    Args:
        named_parameters: names for rules and checkpoints; None numbers the parameters in the order
            of their first reduction, which is the same on every rank and in every run of a model.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        self._names = {p: name for name, p in named_parameters or ()}
        self._slots: dict[torch.Tensor, Slot] = {}
        self._saved: dict[str, dict[str, Any]] = {}

    def slot(self, parameter: torch.Tensor) -> Slot:
        """Return the parameter's slot, with what a checkpoint holds for its name."""
        if parameter not in self._slots:
            name = self._names.get(parameter, str(len(self._slots)))
            slot = Slot(name, **self._saved.pop(name, {}))
            self._slots[parameter] = slot
        return self._slots[parameter]

    @staticmethod
    def lend(
        slot: Slot,
        count: int,
        coding: Coding | None,
        *,
        rank: int,
        size: int,
        device: torch.device = _HOST,
    ) -> None:
        """Give a slot the residuals that its coding needs, in the device's memory.

        Raises:
            UsageError: it has some of another size, from a checkpoint of other ranks or shapes.
        """
        if coding is None or not coding.error_feedback:
            return
        owned = _core.owned_elements(count, spec=coding.spec, id=slot.id, size=size, rank=rank)
        slot.residual = _kept(slot, slot.residual, count, device)
        slot.owner_residual = _kept(slot, slot.owner_residual, owned, device)

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, when the units of the gradients have changed."""
        for slot in self._slots.values():
            for residual in slot.residuals():
                residual.mul_(factor)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies by name, on the host."""
        state = dict(self._saved)
        for slot in self._slots.values():
            state[slot.name] = {"steps": slot.steps} | {
                field: value.to("cpu", copy=True)
                for field in ("residual", "owner_residual")
                if (value := getattr(slot, field)) is not None
            }
        return state

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Replace all slots; each takes up its part when its parameter is next reduced."""
        self._slots_to_names()
        self._saved = {name: _copied(saved) for name, saved in state.items()}

    def _slots_to_names(self) -> None:
        # Numbers given so far stay: buckets come in another order after the first step.
        self._names |= {parameter: slot.name for parameter, slot in self._slots.items()}
        self._slots.clear()


def _copied(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}


def _kept(
    slot: Slot, residual: torch.Tensor | None, count: int, device: torch.device
) -> torch.Tensor:
    if residual is None:
        return torch.zeros(count, device=device)
    if residual.numel() == count:
        return residual.to(device)
    raise UsageError(
        f"parameter {slot.name!r}: the state that was loaded has a residual of {residual.numel()} "
        f"elements, {count} are needed. Load on each rank what state_dict() gave on the same rank, "
        "in a run with as many ranks and the same model and compression"
    )
