"""Check the user's command, and complete it to an executable one."""

from __future__ import annotations

import base64
import difflib
import os
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from qsgd_hpc.errors import UsageError

__all__ = ["notebook_fault", "resolve_command", "stdin_program_at", "with_program"]

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})


def resolve_command(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the command, with this ``python`` before a bare script, after checking its files.

    Like torchrun, this ignores a shebang that names Python, because ``env python3`` finds another
    one if no environment is activated. An executable script may name another program, such as uv.

    Raises:
        UsageError: no command, or the program or script does not exist (with similar names).
    """
    environ = os.environ if environ is None else environ
    if not command:
        raise UsageError("no command given; for example: qsgd-hpc run -np 2 python train.py")
    program, *rest = command
    if program.endswith(".py"):
        _check_script(Path(program))
        return tuple(command) if _names_its_program(program) else (sys.executable, *command)
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise UsageError(_unknown_program(program, environ))
    name = Path(program).name
    if name.startswith("python"):
        kind, at = _source_of(rest)
        if kind == "script":
            _check_script(Path(rest[at]))
    elif name in _SHELLS and (not rest or rest[0] in ("-", "-s")):
        raise UsageError(
            f"{' '.join(command)!r} reads its commands from stdin, which ranks do not have. "
            "Write them to a file and use that file"
        )
    return tuple(command)


def _names_its_program(script: str) -> bool:
    """Return whether a script's shebang applies: it is executable and names another than Python."""
    if os.sep not in script or not os.access(script, os.X_OK) or Path(script).is_dir():
        return False
    with Path(script).open("rb") as file:
        line = file.readline(256)
    words = [Path(word).name for word in os.fsdecode(line[2:]).split()]
    program = next((word for word in words if word != "env" and not word.startswith("-")), "")
    return line.startswith(b"#!") and program != "" and not program.startswith("python")


def stdin_program_at(command: Sequence[str]) -> int | None:
    """Return the position of Python's ``-`` in a command; None if Python reads a file.

    Python may be started by another program (``numactl -N 0 python -``); the ``-`` is then
    required.
    """
    for start, word in enumerate(command):
        if Path(word).name.startswith("python"):
            kind, at = _source_of(command[start + 1 :])
            at += start + 1
            if kind == "stdin" and (start == 0 or at < len(command)):
                return at
            return None
    return None


def _source_of(arguments: Sequence[str]) -> tuple[str, int]:
    """Return the kind of Python's program, and its position in the arguments.

    ``script``; ``stdin`` ("-", or no argument); ``other`` for -c, -m, --version and the like.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        word = arguments[at]
        # Among combined letters, W and X have a value: the rest of the word, or the next word.
        value = next((i for i, letter in enumerate(word) if letter in "WX"), len(word))
        if word == "--check-hash-based-pycs" or value == len(word) - 1:
            at += 1
        elif word.startswith("--") or set(word[1:value]) & set("cmVh?"):
            return "other", at
        at += 1
    stdin = at >= len(arguments) or arguments[at] == "-"
    return "stdin" if stdin else "script", min(at, len(arguments))


def notebook_fault(path: Path) -> str:
    """Return what is wrong with a notebook as a script, and the remedy; "" for other files."""
    if path.suffix != ".ipynb":
        return ""
    return f"{path}: a notebook. Write its code to a script: jupyter nbconvert --to script {path}"


def _check_script(path: Path) -> None:
    if fault := notebook_fault(path):
        raise UsageError(fault)
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder without __main__.py; use the script in it")
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    where = f"in {folder.resolve()}" if folder.is_dir() else f"there is no folder {folder}"
    raise UsageError(f"script {str(path)!r} does not exist ({where}){_near(path.name, names)}")


def _unknown_program(program: str, environ: Mapping[str, str]) -> str:
    if os.sep in program:
        path = Path(program)
        if path.is_dir():
            return f"{program} is a folder, not a program"
        if path.exists():
            unusable = f"{program} is not executable; use chmod +x, or add its interpreter"
            return notebook_fault(path) or unusable
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"program {program!r} does not exist{_near(path.name, names)}"
    names = []
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        if folder and Path(folder).is_dir():
            names += [entry.name for entry in Path(folder).iterdir()]
    return f"program {program!r} is not in PATH{_near(program, names)}"


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, sorted(set(names)), n=2)
    return f". Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


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
