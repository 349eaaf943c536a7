"""The files that site users read, copy and edit: jobs/, templates/, scaling/ of the source tree."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["data"]


def data(folder: str) -> Traversable:
    """Return the shipped folder ``jobs``, ``templates`` or ``scaling``.

    Works the same from a wheel, an sdist build and every kind of editable install.
    """
    return files(f"qsgd_hpc._data.{folder}")
