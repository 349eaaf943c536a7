"""``qsgd-hpc run --check-build``: a table of the available components."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from qsgd_hpc import __version__
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.frameworks import FRAMEWORKS
from qsgd_hpc.launch.mpi import find_launcher, find_library

__all__ = ["table"]


def table() -> str:
    """Return the table: frameworks, launcher and transport."""
    sections = {
        "Frameworks with an API here": [
            (each.title, _is_installed(each.module)) for each in FRAMEWORKS
        ],
        "Ranks are started by": [(f"MPI: {_mpi()}", True), ("Gloo", False)],
        "Messages go through": [
            ("MPI", True),
            ("shared memory within a node", True),
            ("NCCL, for tensors on GPUs", _has_nccl()),
            ("DDL", False),
            ("CCL", False),
            ("Gloo", False),
        ],
    }
    lines = [f"qsgd-hpc {__version__}"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if has else ' '}] {name}" for name, has in rows)]
    return "\n".join(lines)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _has_nccl() -> bool:
    # In a separate process, as in a rank: the launcher itself must not load the core.
    question = "from qsgd_hpc.runtime import gpu; raise SystemExit(not gpu.nccl_version())"
    return subprocess.run([sys.executable, "-c", question], capture_output=True).returncode == 0


def _mpi() -> str:
    try:
        library = find_library()
        return f"{library.name}, {find_launcher(library).path}"
    except UsageError as error:
        return f"none ({error})"
