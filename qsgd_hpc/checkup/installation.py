"""What is on this machine: Python, this package, frameworks, shared memory, GPUs, variables."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import qsgd_hpc
from qsgd_hpc import env
from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.schedulers.common import ask
from qsgd_hpc.jobs.words import counted, did_you_mean
from qsgd_hpc.launch.frameworks import FRAMEWORKS, Framework

__all__ = [
    "core",
    "frameworks",
    "gpu_kernels",
    "gpus",
    "package",
    "probe_core",
    "python",
    "shared_memory",
    "variables",
]

REINSTALL = "Run `pip install --force-reinstall qsgd-hpc`, or `pip install -e .` in a checkout."
# Run in a separate process, because a core built for another machine may die by SIGILL.
PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import qsgd_hpc._core as core
print(json.dumps([core.__file__, core.COMPILER, core.REGION_BYTES]))
"""

PROBE_KERNELS = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from qsgd_hpc.runtime import gpu
from qsgd_hpc.errors import UsageError
try:
    library, fault = gpu.library(), gpu.load_fault()
    text = fault or (library and gpu.platform(library))
    print(json.dumps([not fault, text, gpu.nccl_version()]))
except UsageError as error:
    print(json.dumps([False, str(error), 0]))
"""


def python() -> list[Finding]:
    """Return the version and path of Python; a fault if it is too old."""
    text = f"{platform.python_version()}, {sys.executable}"
    needed = _needed_python()
    if needed and sys.version_info[:2] < needed:
        least = ".".join(map(str, needed))
        return [fault("Python", f"{text}: older than {least}", f"Use Python {least} or later.")]
    return [ok("Python", text)]


def _needed_python() -> tuple[int, ...] | None:
    try:
        text = metadata("qsgd-hpc")["Requires-Python"] or ""
    except PackageNotFoundError:
        return None
    digits = text.removeprefix(">=").split(".")
    return tuple(map(int, digits)) if all(d.isdigit() for d in digits) else None


def package() -> list[Finding]:
    """Return the version and folder of this package; a note if it is not installed."""
    folder = Path(qsgd_hpc.__file__).parent
    text = f"{qsgd_hpc.__version__}, {folder}"
    if qsgd_hpc.__version__.endswith("unknown"):
        return [note("qsgd-hpc", f"{text}: a source tree, not installed", REINSTALL)]
    return [ok("qsgd-hpc", text)]


def core() -> list[Finding]:
    """Load the compiled core; return its file and compiler, or the fault."""
    try:
        path, compiler, _ = probe_core()
    except RuntimeError as error:
        return [fault("compiled core", str(error), REINSTALL)]
    return [ok("compiled core", f"{path}, by {compiler}")]


def gpu_kernels() -> list[Finding]:
    """Return where tensors on GPUs are coded, and how they are sent."""
    answer = ask([sys.executable, "-c", PROBE_KERNELS, json.dumps(sys.path)])
    if answer.code != 0:  # the core does not load, which core() reports
        return []
    fine, text, nccl = json.loads(answer.out.splitlines()[-1])
    if not fine:
        return [fault("GPU kernels", text, "Or code on the host: QSGD_GPU_LIBRARY=none.")]
    if text is None:
        return [ok("GPU kernels", "none: tensors on GPUs are coded on the host (docs/gpu.md)")]
    by = f"by NCCL {nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "likewise"
    return [
        ok("GPU kernels", f"{text}. Codes are sent through pinned memory, by MPI; the rest {by}")
    ]


@functools.cache
def probe_core() -> tuple[str, str, int]:
    """Return the core's file, its compiler, and the bytes of shared memory of each rank.

    Raises:
        RuntimeError: it cannot be loaded; the message has the reason.
    """
    answer = ask([sys.executable, "-c", PROBE, json.dumps(sys.path)])
    if answer.code != 0:
        lines = answer.err.strip().splitlines() or [f"it ended with code {answer.code}"]
        raise RuntimeError(f"cannot be loaded: {lines[-1]}")
    path, compiler, region_bytes = json.loads(answer.out.splitlines()[-1])
    return str(path), str(compiler).strip(), int(region_bytes)


def frameworks() -> list[Finding]:
    """Return the installed frameworks, with faults for old versions and missing bindings.

    Their metadata are read; none is imported, because that is slow and may start a GPU.
    """
    found = [_finding(each) for each in FRAMEWORKS]
    there = [finding for finding in found if finding is not None]
    remedy = "Run `pip install 'qsgd-hpc[torch]'`, or [tensorflow], [keras] or [jax]."
    return there or [note("frameworks", "none is installed; qsgd_hpc.arrays needs none", remedy)]


def _finding(framework: Framework) -> Finding | None:
    name, extra, binding = framework.title, framework.module, framework.binding
    has = _version(framework.distributions or (framework.module,))
    if has is None:
        return None
    least = _least(extra)
    if least and _numbers(has) < _numbers(least):
        remedy = f"Run `pip install 'qsgd-hpc[{extra}]'`."
        return fault(name, f"{has} is older than {least}, the oldest supported version", remedy)
    if not binding:
        return ok(name, f"{has}, supported by the compiled core")
    file = next((f for end in EXTENSION_SUFFIXES if (f := _file(binding, end)).exists()), None)
    if file is None:
        return fault(name, f"{has}, but qsgd_hpc/{binding} was not built", REINSTALL)
    return ok(name, f"{has}, {file}")


def _file(binding: str, suffix: str) -> Path:
    return Path(qsgd_hpc.__file__).parent / f"{binding}{suffix}"


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _least(extra: str) -> str | None:
    """Return the least version required by the metadata of this package."""
    try:
        rows = requires("qsgd-hpc") or []
    except PackageNotFoundError:
        return None
    pattern = rf"""{extra}[>=]=([\d.]+)\s*;.*extra == ['"]{extra}['"]"""
    return next((match[1] for row in rows if (match := re.match(pattern, row))), None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


SHARED = Path("/dev/shm")
# Each command, and how the lines begin that describe one GPU each.
GPU_COMMANDS = {
    ("nvidia-smi", "-L"): "GPU ",
    ("rocm-smi", "--showuniqueid", "--csv"): "card",
    ("xpu-smi", "discovery", "--dump", "1"): "",
}


def shared_memory(folder: Path = SHARED) -> list[Finding]:
    """Return for how many ranks there is shared memory; others communicate through MPI."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "Mount a tmpfs there; until then, ranks of a node communicate through MPI."
        return [note("shared memory", f"{folder}: {error.strerror}", remedy)]
    text = f"{folder}, {free_bytes >> 20} MB free"
    try:
        *_, region_bytes = probe_core()
    except RuntimeError:
        return [ok("shared memory", text)]
    ranks, cores = free_bytes // region_bytes, os.cpu_count() or 1
    if ranks >= cores:
        return [ok("shared memory", text)]
    text += f": room for {counted(ranks, 'rank')} of {counted(cores, 'core')}"
    remedy = "Further ranks of a node communicate through MPI. In a container: --shm-size=1g."
    return [note("shared memory", text, remedy)]


def gpus() -> list[Finding]:
    """Count the GPUs by the vendors' tools that are on PATH."""
    found = []
    for command, start in GPU_COMMANDS.items():
        if shutil.which(command[0]) is None:
            continue
        answer = ask(command)
        lines = [line.strip() for line in answer.out.splitlines() if line.strip()]
        seen = [line for line in lines if line.startswith(start)] if start else lines[1:]
        output = " ".join((answer.err or answer.out).split())[:200]
        if answer.code == 0 and seen:
            found.append(ok("GPUs", f"{counted(len(seen), 'GPU')} seen by {command[0]}"))
        else:
            text = f"{command[0]} sees none: {output or f'exit code {answer.code}'}"
            found.append(note("GPUs", text, "On a login node this is expected."))
    names = ", ".join(command[0] for command in GPU_COMMANDS)
    return found or [ok("GPUs", f"none (none of {names} is on PATH)")]


def variables(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Find unknown QSGD_* variables and invalid values."""
    environ = os.environ if environ is None else environ
    found = []
    for name in env.TABLE:
        try:
            env.get(name, environ)
        except UsageError as error:
            found.append(fault("variables", str(error), "Correct or unset it."))
    for name in env.unknown(environ):
        near = did_you_mean(name, env.TABLE)
        remedy = near if near.startswith("Did") else "See docs/settings.md for the variables."
        found.append(note("variables", f"{name} is not a setting", remedy))
    count = sum(env.is_set(name, environ) for name in env.TABLE)
    return found or [ok("variables", f"{counted(count, 'setting')} from the environment")]
