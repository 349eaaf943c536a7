"""Every QSGD_* environment variable, in one table: the only place in Python that reads them.

Precedence everywhere: argument, environment, site profile, default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["TABLE", "Variable", "flag", "get", "is_set"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def flag(text: str) -> bool:
    """Parse a boolean; anything but 1/0/true/false/yes/no/on/off is a ValueError."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return parse


def _at_least(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not least <= value < 2**63:
            raise ValueError(f"expected at least {least:g}, and less than 2^63")
        return value

    return parse


def _bits(text: str) -> int:
    value = int(text)
    if value not in (2, 4, 8, 32):
        raise ValueError("expected 2, 4, 8 or 32 (32 sends plain float32)")
    return value


@dataclass(frozen=True)
class Variable:
    """One row: how to parse it, what it is when unset, and what it does."""

    parse: Callable[[str], Any]
    default: Any
    what: str


TABLE: dict[str, Variable] = {
    "QSGD_BITS": Variable(
        _bits,
        None,
        "bits per gradient element for a DistributedOptimizer that names no compression",
    ),
    "QSGD_BUCKET_SIZE": Variable(
        _at_least(int, 64), 512, "elements that share one norm; a multiple of 64"
    ),
    "QSGD_NORM": Variable(_one_of("max", "l2"), "max", "norm of a bucket: max or l2"),
    "QSGD_MIN_ELEMENTS": Variable(
        _at_least(int, 0), 1024, "gradients with fewer elements, or one dimension, stay float32"
    ),
    "QSGD_SEED": Variable(_at_least(int, 0), 0, "seed of the rounding noise; equal on every rank"),
    "QSGD_FUSION_BYTES": Variable(
        _at_least(int, 0), 64 << 20, "gradient bytes that one fused reduction may hold"
    ),
    "QSGD_NONFINITE": Variable(
        _one_of("error", "warn", "propagate"),
        "error",
        "what a gradient with NaN or Inf does: raise on every rank, warn, or pass silently",
    ),
    "QSGD_STALL_WARNING_S": Variable(
        _at_least(float, 0), 60.0, "seconds before a tensor that some ranks lack is named; 0: never"
    ),
    "QSGD_LIFELINE": Variable(flag, True, "watch the other ranks over TCP, so a dead one is named"),
    "QSGD_RANKS_PER_NODE": Variable(
        _at_least(int, 1), None, "treat each run of so many ranks as one node (simulated nodes)"
    ),
    "QSGD_MPI_ABI": Variable(
        _one_of("int", "pointer"), None, "handle type of an MPI that this package does not know"
    ),
    "QSGD_RUN_GRACE_S": Variable(
        _at_least(float, 0), 25.0, "seconds that ranks have to end once one has failed (run)"
    ),
    "QSGD_DATA": Variable(str, None, "folder that holds the tutorials' data sets"),
    "QSGD_HOME": Variable(str, "~/.qsgd-hpc", "where jobs are registered"),
    "QSGD_SITE": Variable(str, None, "site profile to use instead of detecting one"),
    "QSGD_ACCOUNT": Variable(str, None, "account (project) that pays for submitted jobs"),
    "QSGD_RECORDS": Variable(str, None, "JSON-lines file that qsgd_hpc.scaling.record appends to"),
}


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the variable is in the environment and not empty."""
    return bool((os.environ if environ is None else environ).get(name))


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return a variable's parsed value, or its default when unset or empty.

    Raises:
        UsageError: the text cannot be parsed; the message names the variable and the text.
    """
    row = TABLE[name]
    text = (os.environ if environ is None else environ).get(name)
    if not text:
        return row.default
    try:
        return row.parse(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: {error}. It sets the {row.what}.") from None
