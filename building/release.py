"""Build all files of a release, and check them: ``make release``.

The version is in pyproject.toml; CITATION.cff and the newest section of CHANGELOG.md must have the
same one. Writes to dist/: sdist, wheels, SHA256SUMS, and NOTES.md from the changelog.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

from building.compiler import ROOT
from building.wheel import build_sdist, main, run

__all__ = ["faults", "notes", "version"]

DIST = ROOT / "dist"


def version(root: Path = ROOT) -> str:
    """Return the package's version."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text("utf-8"), re.M)
    assert found, "pyproject.toml names no version"
    return found[1]


def notes(root: Path = ROOT) -> tuple[str, str]:
    """Return the title and the text of the changelog's newest section."""
    _, section, *_ = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.M)
    title, _, text = section.partition("\n")
    return title.strip(), text.strip() + "\n"


def faults(root: Path = ROOT) -> list[str]:
    """Return the reasons why this tree cannot be released."""
    found = []
    expected = version(root)
    cited = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text("utf-8"), re.M)
    if not cited or cited[1] != expected:
        found.append(
            f"CITATION.cff has version {cited and cited[1]}, pyproject.toml {expected}: "
            "correct CITATION.cff"
        )
    title, _ = notes(root)
    if not re.fullmatch(rf"\[{re.escape(expected)}\] - \d{{4}}-\d\d-\d\d", title):
        found.append(
            f"the newest section of CHANGELOG.md is '{title}': it should be '[{expected}] - ' and "
            "the date of the release"
        )
    return found


def release() -> None:
    """Build, check, and print the remaining commands.

    Raises:
        SystemExit: the tree cannot be released, or a step failed.
    """
    found = faults()
    if changed := run("git", "status", "--porcelain").splitlines():
        found.append(f"{len(changed)} files are not committed, such as {changed[0].split()[-1]}")
    if found:
        raise SystemExit("\n".join(["cannot release:", *found]))
    shutil.rmtree(DIST, ignore_errors=True)
    wheels = main(["--every-python", "--every-target"])
    files = sorted([build_sdist(DIST), *wheels])
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(sums), "utf-8")
    (DIST / "NOTES.md").write_text(notes()[1], "utf-8")
    print("".join(sums), end="")
    print(f"left to do: git tag -s v{version()}; twine upload {DIST}/qsgd_hpc-*; push the tag")


if __name__ == "__main__":
    release()
