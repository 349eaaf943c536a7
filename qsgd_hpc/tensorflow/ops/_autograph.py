"""Keeps AutoGraph from rewriting this package's Python when it runs inside a ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

__all__ = ["as_written"]

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """Return the function, with what it calls to run as it is written."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))
