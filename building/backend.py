"""Build backend: setuptools' backend, plus a compiler from PyPI if the machine has none."""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from building.compiler import choose

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return the requirements of setuptools, and the package of a compiler if needed."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, *choose().requirements]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the same for an editable install."""
    needed = build_meta.get_requires_for_build_editable(config_settings)
    return [*needed, *choose().requirements]
