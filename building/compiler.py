"""Choice of the C++ compiler of a build: the machine's, or PyPI's ziglang if that cannot build it.

    python -m building.compiler    print the packages that pip must install for it; stderr names it

QSGD_TARGET=x86_64-linux-gnu.2.17 selects ziglang, for that processor and that glibc, as required
for wheels that run on all machines; QSGD_TARGET=native never selects ziglang.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GLIBC", "Compiler", "architecture", "choose"]

ROOT = Path(__file__).parents[1]
GLIBC = "2.17"  # of 2012: older than that of any system with Python 3.10
ZIGLANG = "ziglang>=0.14"
PASSED = ROOT / "build" / "compilers"  # has a file for each compiler that passed a trial
# The sources that an old compiler is most likely to fail on: those with vector instructions.
TRIAL = ("csrc/quant/kernels_avx512.cc", "csrc/quant/kernels_neon.cc")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: command that compiles and links C++.
        usual: whether setuptools selects it by default.
        target: target that ziglang compiles for; empty for other compilers.
        why: reason for ziglang.
    """

    command: tuple[str, ...]
    usual: bool = False
    target: str = ""
    why: str = ""

    @property
    def flags(self) -> list[str]:
        """The flags with which this compiler behaves like the others by default."""
        if not self.target:
            return []
        # At -O0, ziglang adds checks for undefined behaviour that end the process. Its headers are
        # of a newer glibc than this Python's and define POSIX macros differently.
        return ["-fomit-frame-pointer", "-fno-sanitize=all", "-Wno-macro-redefined"]

    @property
    def link_flags(self) -> list[str]:
        """The flags to link: without symbols, which are useless without ziglang's library."""
        return ["-s"] if self.target else []

    @property
    def requirements(self) -> list[str]:
        """The packages that pip must install for it."""
        return [ZIGLANG] if self.target else []

    def __str__(self) -> str:
        if not self.target:
            return f"{self.command[0]} compiles"
        return f"PyPI's ziglang compiles for {self.target} ({self.why})"


def choose(environ: Mapping[str, str] = os.environ) -> Compiler:
    """Return the compiler of this build.

    Raises:
        SystemExit: QSGD_TARGET=native, and this machine has no suitable compiler.
    """
    target = environ.get("QSGD_TARGET", "")
    if target not in ("", "native"):
        return ziglang(target, "QSGD_TARGET is set")
    faults = []
    for place, command in enumerate(installed(environ)):
        fault = trial(command)
        if not fault:
            return Compiler(command, usual=place == 0)
        faults.append(f"{shlex.join(command)}: {fault}")
    why = "no C++17 compiler here: " + "; ".join(faults)
    if target == "native":
        raise SystemExit(f"QSGD_TARGET=native: {why}")
    return ziglang(f"{platform.machine()}-linux-gnu.{GLIBC}", why)


def architecture(target: str) -> str:
    """Return the processor of a target; without a target, this machine's."""
    return target.partition("-")[0] if "-" in target else platform.machine()


def ziglang(target: str, why: str) -> Compiler:
    """Return the compiler in PyPI's package ziglang, which need not be installed yet."""
    return Compiler(
        (sys.executable, "-m", "ziglang", "c++", "-target", target), target=target, why=why
    )


def installed(environ: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the compilers to try: the one in CXX, or else this Python's and the usual ones."""
    named = environ.get("CXX")
    commands = [named] if named else [sysconfig.get_config_var("CXX") or "", "g++", "c++"]
    yield from dict.fromkeys(tuple(shlex.split(command)) for command in commands if command)


def trial(command: tuple[str, ...]) -> str:
    """Return why a compiler cannot build this package; empty if it can.

    A trial takes seconds and pip runs several processes, so successes are kept.
    """
    kept = PASSED / _digest(command)
    if kept.exists():
        return ""
    fault = _fault(command)
    if not fault:
        with contextlib.suppress(OSError):  # the folder may be read-only
            PASSED.mkdir(parents=True, exist_ok=True)
            kept.touch()
    return fault


def _digest(command: tuple[str, ...]) -> str:
    """Return a name for a compiler, as it is now, and for what it compiles in a trial."""
    program = shutil.which(command[0]) or ""
    facts = Path(program).stat() if program else None
    digest = hashlib.sha256(
        repr((command, program, facts and (facts.st_size, facts.st_mtime_ns))).encode()
    )
    for path in sorted([*ROOT.glob("csrc/quant/*.h"), *(ROOT / source for source in TRIAL)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _fault(command: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = ["-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-Icsrc", *TRIAL]
        try:
            done = subprocess.run(
                [*command, *words, "-o", str(Path(folder, "trial.so"))],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            return error.strerror or "it cannot be run"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def main() -> None:
    """Print the requirements for the Makefile."""
    chosen = choose()
    print(f"== {chosen}", file=sys.stderr)
    print(*chosen.requirements)


if __name__ == "__main__":
    main()
