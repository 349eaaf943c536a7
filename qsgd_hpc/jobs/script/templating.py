"""The included templates of shell scripts, with a filter that quotes values."""

from __future__ import annotations

import functools
import shlex

import jinja2

from qsgd_hpc._data import data as shipped

__all__ = ["shell_templates"]


@functools.cache
def shell_templates() -> jinja2.Environment:
    """Return the environment of templates/*.sh.j2; the filter ``sh`` quotes for the shell."""
    folder = shipped("templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = shlex.quote
    return environment
