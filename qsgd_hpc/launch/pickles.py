"""Pickle functions by value, keeping the names of their files."""

from __future__ import annotations

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["dumps"]


def dumps(what: object) -> bytes:
    """Return a pickle of ``what``, including functions of scripts and closures."""
    file = io.BytesIO()
    _Pickler(file).dump(what)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        # cloudpickle 3.1.3 names every file "<dynamic-code>", so tracebacks would lack the source.
        return _code, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))


def _code(filename: str, make: Callable[..., types.CodeType], args: Any) -> types.CodeType:
    return make(*args).replace(co_filename=filename)
