"""Names of an optimizer's parameters, for messages and compression rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from qsgd_hpc.errors import UsageError

__all__ = ["name_parameters", "plain_name"]

# Modules by which torch.compile and activation checkpointing wrap others.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts of wrappers, as rules and checkpoints know it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def name_parameters(
    owned: Sequence[torch.Tensor], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return a name for each of the optimizer's parameters, and those given for others.

    The optimizer may get the others later, by ``add_param_group``.

    Args:
        owned: the optimizer's parameters.
        named_parameters: names for these and possibly other parameters; None numbers them.
    Raises:
        UsageError: names are duplicated or missing, or there are no pairs.
    """
    if named_parameters is None:
        return {p: str(i) for i, p in enumerate(owned)}
    listed = list(named_parameters)
    if any(isinstance(p, str) or not isinstance(p, Sequence) or len(p) != 2 for p in listed):
        raise UsageError(
            "named_parameters takes pairs of name and parameter: pass "
            "model.named_parameters(), not model.parameters() or a dict"
        )
    pairs = [(plain_name(name), parameter) for name, parameter in listed]
    doubled = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
    if doubled:
        raise UsageError(f"named_parameters contains duplicate names: {', '.join(doubled)}")
    names = {parameter: name for name, parameter in pairs}
    lost = [tuple(p.shape) for p in owned if p not in names]
    if lost:
        raise UsageError(
            f"named_parameters lacks {len(lost)} of the optimizer's {len(owned)} parameters "
            f"(shapes {', '.join(map(str, lost[:5]))}); pass model.named_parameters() of the same "
            "model"
        )
    return names
