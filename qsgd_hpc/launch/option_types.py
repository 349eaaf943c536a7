"""Click types of options, and commands whose --help shows options in groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import click

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.options import CHOICES_OF_BITS, is_choice_of_bits
from qsgd_hpc.rules import AUTO_BITS

__all__ = ["GroupedCommand", "GroupedOption", "TranslatingCommand", "training_options"]


class _Bits(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A value of QSGD_BITS."""

    name = "bits"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Return the number, or "auto"."""
        bits = value if value == AUTO_BITS or not str(value).isdecimal() else int(value)
        if not is_choice_of_bits(bits):
            self.fail(f"{value}: {CHOICES_OF_BITS}", param, ctx)
        return bits  # type: ignore[no-any-return]


def training_options(**kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options on how the ranks train, with these arguments."""
    options = (
        click.option(
            "--bits",
            type=_Bits(),
            metavar="B",
            help="Bits per gradient element: 1 to 8; 32: off; auto: 8, 4 or off, whichever is "
            "fastest here.",
            **kwargs,
        ),
        click.option(
            "--weight-bits",
            type=click.IntRange(2, 8),
            metavar="B",
            help="Bits per element of the weights that FSDP2 gathers: 2 to 8. Default: "
            "uncompressed.",
            **kwargs,
        ),
        click.option(
            "--horovod",
            is_flag=True,
            help='Let "import horovod" in the script mean qsgd-hpc.',
            **kwargs,
        ),
        click.option(
            "--torchrun/--no-torchrun",
            default=None,
            help="Set torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... "
            "Default: yes, except with --horovod.",
            **kwargs,
        ),
    )

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda done, option: option(done), reversed(options), function)

    return add


class GroupedOption(click.Option):
    """An option that belongs to a group; default: "Options"."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists groups in the order in which they first occur."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class TranslatingCommand(click.Command):
    """A command that refuses flags of other programs with what to use in place of them.

    Attributes:
        foreign: for each program, its flags, separated by spaces, and the remedy for them.
    """

    foreign: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (answer := self._answer(error.option_name)) is None:
                raise
            raise UsageError(answer) from None

    def _answer(self, flag: str) -> str | None:
        for program, remedies in self.foreign.items():
            for flags, instead in remedies.items():
                if flag.replace("_", "-") in flags.split():
                    return f"{flag} is a flag of {program}: {instead}"
        return None
