"""horovodrun's flags as options of ``qsgd-hpc run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from qsgd_hpc.launch.grouped_help import GroupedOption
from qsgd_hpc.launch.horovod_flags import (
    ALSO,
    CHANGES_NOTHING,
    SETTINGS,
    Setting,
    name_of,
    read_config,
    values_after,
    variables_of,
)

__all__ = ["horovod_options", "variables_and_remarks"]

GROUP = "Tuning and observing, as horovodrun"


def horovod_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; its function gets them as keyword arguments."""
    for option in reversed(CHANGES_NOTHING):
        count = values_after(option)
        value: dict[str, Any] = {"nargs": count} if count else {"is_flag": True, "default": None}
        names = (option, *ALSO.get(option, ()), name_of(option))
        function = click.option(*names, hidden=True, **value)(function)
    for setting in reversed(SETTINGS):
        function = _option(setting)(function)
    return function


def _option(setting: Setting) -> Callable[..., Any]:
    shared: dict[str, Any] = {"cls": GroupedOption, "group": GROUP, "help": setting.what}
    if setting.kind is bool:
        names = f"{setting.option}/--no-{setting.option[2:]}"
        return click.option(names, default=None, **shared)
    metavar = {float: "X", int: "N", str: "TEXT"}[setting.kind]
    return click.option(setting.option, type=setting.kind, metavar=metavar, **shared)


def variables_and_remarks(
    given: Mapping[str, Any], config: Path | None
) -> tuple[dict[str, str], list[str]]:
    """Return the variables for the ranks, and remarks on flags that have no effect.

    Args:
        given: flags' values by argument name, None if not given; they override the file.
        config: horovodrun's configuration file.

    Raises:
        UsageError: the file is invalid.
    """
    values, unused = ({}, []) if config is None else read_config(config)
    values |= {name: value for name, value in given.items() if value is not None}
    unused += [each for each in CHANGES_NOTHING if given.get(name_of(each))]
    return variables_of(values), [f"{each}: {CHANGES_NOTHING[each]}" for each in unused]
