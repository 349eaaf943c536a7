"""Typed random keys, which can be sent and stored only as the integers that they contain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["integers_of", "kind_of", "of_kind"]


def kind_of(array: Any) -> Any:
    """Return the generator of an array of keys, such as ``"threefry2x32"``; else None."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(array) if is_key else None


def integers_of(array: Any) -> Any:
    """Return the integers of an array of keys; other arrays unchanged."""
    return array if kind_of(array) is None else jax.random.key_data(array)


def of_kind(array: Any, kind: Any) -> Any:
    """Return an array of keys from their integers; the array itself if ``kind`` is None."""
    return array if kind is None else jax.random.wrap_key_data(array, impl=kind)
