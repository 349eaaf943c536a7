"""Facts about the machine of a process, with little overhead for a training script."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from qsgd_hpc.launch.schedulers import JOB_IDS, NODE_FILES

__all__ = ["cpu_model", "gpu_model", "place", "threads"]

TOOL_LIMIT_S = 10.0
_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about the job's machine; unavailable ones are omitted.

    ``scheduler_job``, ``nodes`` (in the scheduler's notation), ``modules``, ``gpus`` (names in the
    driver's order), ``governor`` and ``clock_khz`` (smallest, largest, current) of core 0.
    """
    found: dict[str, Any] = {
        "scheduler_job": next((environ[n] for n in JOB_IDS if environ.get(n)), None),
        "nodes": _nodes(environ),
        "modules": [m for m in environ.get("LOADEDMODULES", "").split(":") if m],
        "gpus": _gpus(),
        "governor": _line(_CLOCK / "scaling_governor"),
        "clock_khz": [
            int(value)
            for name in ("cpuinfo_min_freq", "cpuinfo_max_freq", "scaling_cur_freq")
            if (value := _line(_CLOCK / name)) is not None and value.isdigit()
        ],
    }
    return {name: value for name, value in found.items() if value}


def _nodes(environ: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if nodes := environ.get(name):
            return nodes
    for name in NODE_FILES:
        if file := environ.get(name):
            try:
                return ",".join(dict.fromkeys(Path(file).read_text().split()))
            except OSError:
                continue
    return None


def _gpus() -> list[str]:
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(words[0]) is None:
        return []
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """Return the processor's name, such as 'AMD EPYC 7543P 32-Core Processor'."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in {"model name", "cpu model"} and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown"


def gpu_model() -> str | None:
    """Return the name of the GPU that the framework in this process uses; None without one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and (gpus := tensorflow.config.get_visible_devices("GPU")):
        details = tensorflow.config.experimental.get_device_details(gpus[0])
        return str(details.get("device_name", "GPU"))
    return None


def threads() -> int:
    """Return the number of threads with which this process computes."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return int(torch.get_num_threads())
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and (
        count := tensorflow.config.threading.get_intra_op_parallelism_threads()
    ):
        return int(count)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    # The cores that the scheduler allows for this process may be fewer than the machine's.
    return int(asked) if asked.isdecimal() else len(os.sched_getaffinity(0))
