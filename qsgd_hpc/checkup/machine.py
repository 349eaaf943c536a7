"""Shared memory, GPUs, and the QSGD_* variables of this shell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.checkup.installation import probe_core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.schedulers.command import ask
from qsgd_hpc.jobs.words import counted, did_you_mean

__all__ = ["gpus", "shared_memory", "variables"]

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
