"""Runs what a Markdown page shows, and holds the page to what comes out.

- A ``console`` block holds commands after ``$ `` and what each prints. Words must be those of the
  page, numbers and paths may differ; in a ``console exact`` block they must be the same too. A line
  ``...`` stands for any lines.
- ``<!-- test: LONG => SHORT -->`` on a page: the tests run the command with SHORT in place of LONG.
  ``<!-- test: needs data -->``: its numbers are of the data set that QSGD_DATA names.
- A ``python`` block is quoted from a script of the page's folder: its lines stand there, in a row,
  however they are indented. An example that stands nowhere else is a ``py`` block.
- A ``diff`` block is quoted from two of them: what ``+`` adds stands in one that the page names, as
  does what ``-`` takes away.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BLOCK",
    "Session",
    "assert_printed",
    "assert_quotes",
    "blocks",
    "masked",
    "repository_pages",
    "run_page",
    "sessions",
]

ROOT = Path(__file__).parents[2]
# A fenced block: what stands behind the fence, and its text.
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
SHORTER = re.compile(r"<!-- test: (.+?) => (.*?) -->")
# Numbers, host names and paths differ from machine to machine; the words around them do not.
VOLATILE = re.compile(
    r"\x1b\[[0-9;]*m|/[\w./-]+"
    r"|(?:(?<![^\s(=])-)?[0-9][0-9.,:]*(?:e[+-]?[0-9]+)?(?: (?:[kMG]?B|[mu]?s)\b)?"
)


@dataclass(frozen=True)
class Session:
    """One command of a page and the lines that are said to follow it."""

    command: str
    expected: tuple[str, ...]
    exact: bool


def repository_pages() -> list[Path]:
    """Return the Markdown pages for readers: none that is installed, made, or there for a test."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", ":!tests"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.splitlines()]


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """Yield each fenced block of these languages: what stands behind the fence, and its text."""
    for info, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if info.partition(" ")[0] in languages:
            yield info, text


def sessions(page: Path) -> list[Session]:
    """Return the commands of a page in their order."""
    found = []
    for info, text in blocks(page, "console"):
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            while command.endswith("\\") and output:
                command = command[:-1].rstrip() + " " + output.pop(0).strip()
            found.append(Session(command, tuple(output), "exact" in info.split()))
    return found


def masked(line: str) -> str:
    """Return a line without what differs from machine to machine."""
    return " ".join(VOLATILE.sub("#", line).replace("#", " # ").split())


def assert_printed(
    session: Session, printed: str, mask: Callable[[str], str] | None = None
) -> None:
    """Hold what a command printed against the page: its lines, and nothing between them."""
    mask = mask or (str.rstrip if session.exact else masked)
    lines = [mask(line) for line in printed.rstrip("\n").split("\n")]
    at, gap = 0, False
    for place, line in enumerate(session.expected):
        if line.strip() == "...":
            gap = True
            continue
        wanted = mask(line)
        here = at
        if gap:
            rest = session.expected[place:]
            if "..." not in [each.strip() for each in rest]:  # what comes last, to the end
                here = max(at, len(lines) - len(rest))
            elif wanted in lines[at:]:
                here = lines.index(wanted, at)
        found = lines[here] if here < len(lines) else "(nothing)"
        assert found == wanted, f"{session.command}\nsaid:    {line}\nprinted: {found}\n\n{printed}"
        at, gap = here + 1, False
    said_all = gap or at == len(lines) or (not session.expected and not printed.strip())
    assert said_all, f"{session.command}: more was printed:\n{printed}"


def run_page(
    page: Path,
    folder: Path,
    *,
    home: Path,
    shorter: Mapping[str, str] | None = None,
    mask: Callable[[str], str] | None = None,
    wanted: Callable[[str], bool] = bool,
) -> None:
    """Run the commands of a page one after the other in a folder, as a reader would.

    Args:
        page: the Markdown file.
        folder: where the commands run.
        home: for jobs and caches.
        shorter: what to replace in commands, beside what the page itself says.
        mask: takes out of a line what may differ; None: as the blocks say.
        wanted: tells by its text whether a command is to run.
    """
    replace = {**dict(SHORTER.findall(page.read_text(encoding="utf-8"))), **(shorter or {})}
    environ = {
        **os.environ,
        "QSGD_HOME": str(home),
        "QSGD_SITE": "local",  # what a page does not send elsewhere
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "MPLBACKEND": "agg",
    }
    for name in ("QSGD_ACCOUNT", "QSGD_JOB_DIR", "QSGD_ATTEMPT"):
        environ.pop(name, None)
    for session in sessions(page):
        command = session.command
        if not wanted(command):
            continue
        for long, short in replace.items():
            command = command.replace(long, short)
        done = subprocess.run(
            command,
            shell=True,
            executable="/bin/bash",
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = [line for line in session.expected if line.strip()]
        refused = bool(said) and said[-1].startswith("qsgd-hpc: ")  # what goes on says more
        assert (done.returncode == 0) != refused, f"{command}\n{done.stdout}"
        assert "Traceback" not in done.stdout, f"{command}\n{done.stdout}"
        assert_printed(session, done.stdout, mask)


def assert_quotes(page: Path) -> None:
    """Hold the code that a page shows against the scripts of its folder."""
    scripts = {path: path.read_text(encoding="utf-8") for path in page.parent.rglob("*.py")}
    for _, text in blocks(page, "python"):
        wanted = _flush(text)
        assert any(wanted in _flush(script, wanted) for script in scripts.values()), (
            f"{page}: no script beside it has\n{text}"
        )
    lines = {line.strip() for script in scripts.values() for line in script.splitlines()}
    for _, text in blocks(page, "diff"):
        for line in text.splitlines():
            if line[:1] in "+- " and line[:3] not in ("+++", "---"):
                assert not line[1:].strip() or line[1:].strip() in lines, f"{page}: {line}"


def _flush(text: str, like: str | None = None) -> str:
    """Return a text without the indentation of its block, or of the block that begins `like`."""
    if like is None:
        return textwrap.dedent(text).strip("\n")
    first = like.split("\n", 1)[0]
    found = re.search(rf"^([ \t]*){re.escape(first)}$", text, re.M)
    indent = found.group(1) if found else ""
    return "\n".join(line.removeprefix(indent) for line in text.split("\n"))
