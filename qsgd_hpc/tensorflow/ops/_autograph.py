"""Protection of this package's Python code from AutoGraph, in a ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

__all__ = ["without_autograph"]

F = TypeVar("F", bound=Callable[..., Any])


def without_autograph(function: F) -> F:
    """Return a function that AutoGraph does not convert, including the functions that it calls."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))
