"""Facts about the machine that a process runs on; cheap enough for a training script."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

__all__ = ["cpu_model"]


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
