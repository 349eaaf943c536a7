"""Environments of Python that see this one's packages, and commands run in them."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

__all__ = ["ROOT", "environment", "run"]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def environment(folder: Path) -> Path:
    """Return the Python of a new environment that sees this one's packages behind its own."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(purelib) / "zz_first_environment.pth").write_text(line)
    return python
