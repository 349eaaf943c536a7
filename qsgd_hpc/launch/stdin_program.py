"""Send a program from stdin to every rank, as in ``run -np 2 python - < train.py``.

mpiexec passes stdin to rank 0 at most. Therefore the launcher reads the program and puts it into
the command line, encoded so that no launcher's quoting can change it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import BinaryIO

from qsgd_hpc.errors import UsageError

__all__ = ["with_program"]

MOST_BYTES = 120_000  # the kernel's limit for one argument is 128 KiB
_RUN = (
    "__import__('sys').argv[0]='-';exec(compile(__import__('zlib').decompress("
    "__import__('base64').b64decode('{}')),'<stdin>','exec',dont_inherit=True))"
)


def with_program(command: Sequence[str], at: int, stdin: BinaryIO | None) -> tuple[str, ...]:
    """Return a Python command that contains the program that it would read from stdin.

    Args:
        command: the user's command.
        at: the position of ``-``, given or implied.
        stdin: this process's stdin; None if it has none.

    Raises:
        UsageError: stdin contains no program, or one that is too long.
    """
    remedy = "Write the program to a file that every rank can read, and use that file"
    text_of_command = " ".join(command)
    if stdin is not None and stdin.isatty():
        raise UsageError(
            f"{text_of_command!r} reads its program from stdin, and that is a terminal. {remedy}"
        )
    text = b"" if stdin is None else stdin.read()
    if not text.strip():
        raise UsageError(
            f"{text_of_command!r} reads its program from stdin, and there is none. {remedy}"
        )
    code = _RUN.format(base64.b64encode(zlib.compress(text, 9)).decode("ascii"))
    if len(code) > MOST_BYTES:
        raise UsageError(
            f"the program on stdin has {len(text):,} bytes, packed {len(code):,}; at most "
            f"{MOST_BYTES:,} can be sent to the ranks. {remedy}"
        )
    return (*command[:at], "-c", code, *command[at + 1 :])
