"""Write measurements of a training script, one JSON line per event, and facts on its machine."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from qsgd_hpc import __version__, env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.frameworks import FRAMEWORKS
from qsgd_hpc.launch.schedulers import JOB_IDS, NODE_FILES

__all__ = ["RESERVED", "cpu_model", "gpu_model", "place", "record", "threads"]

RESERVED = ("time", "host", "pid", "cpu", "cores", "load", "versions", "mpi", "place", "nonfinite")
"""Keys that :func:`record` writes itself."""

_LIBRARIES = ("numpy", *(each.module for each in FRAMEWORKS), "mpi4py")


def record(event: str, **fields: Any) -> None:
    """Append one event to the file of QSGD_RECORDS; do nothing if it is unset.

    Call it on rank 0 only, ``if hvd.rank() == 0: record("epoch", epoch=1, images_per_s=812.0)``.
    The line is one write to a file opened for appending, so lines are never mixed,
    and a killed process can truncate only the last one.

    Args:
        event: name of the event; a study reads "epoch" and "final" (scaling/README.md lists their
            fields); others are stored unchanged.
        fields: JSON values, NumPy or framework scalars, lists and dicts of them. NaN and infinities
            are written as null and listed in the line's ``nonfinite`` field, so that a diverged run
            can also be recorded.
    Raises:
        UsageError: a field that JSON cannot represent or that is reserved (all such fields are
            named), or a file that cannot be written.
    """
    target = env.get("QSGD_RECORDS")
    if target is None:
        return
    line = _encode(event, fields)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(
            f"QSGD_RECORDS={target!r}: cannot append to it: {error.strerror}. "
            "Point it at a file in a folder that exists and is writable, or unset it."
        ) from None
    if written != len(line):
        raise UsageError(
            f"QSGD_RECORDS={target!r}: only {written} of {len(line)} bytes were written. "
            "Is the file system full?"
        )


def _encode(event: str, fields: Mapping[str, Any]) -> bytes:
    faults: list[str] = []
    if not isinstance(event, str) or not event:
        faults.append(f"record: event is {event!r}; expected a name such as 'epoch' or 'final'.")
    if taken := sorted(set(fields) & set(RESERVED)):
        faults.append(f"record: {', '.join(taken)}: written by record itself; rename the field.")
    nonfinite: dict[str, str] = {}
    values = {name: _plain(value, name, nonfinite, faults) for name, value in fields.items()}
    if faults:
        raise UsageError("\n".join(faults))
    body: dict[str, Any] = {"event": event, **values, **_origin()}
    # Once per run only, because all ranks write a record and querying GPUs is slow.
    if event == "final" or (event == "engine" and values.get("rank") == 0):
        body["place"] = place(os.environ)
    if nonfinite:
        body["nonfinite"] = nonfinite
    return (json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _plain(value: Any, name: str, nonfinite: dict[str, str], faults: list[str]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite[name] = str(float(value))
        return None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{name}.{k}", nonfinite, faults) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{name}[{i}]", nonfinite, faults) for i, v in enumerate(value)]
    item = getattr(value, "item", None)  # NumPy and framework scalars
    if callable(item):
        try:
            return _plain(item(), name, nonfinite, faults)
        except (RuntimeError, TypeError, ValueError):
            pass
    faults.append(
        f"record: {name} is a {type(value).__name__}; "
        "expected a number, text, or a list or dict of them."
    )
    return None


def _origin() -> dict[str, Any]:
    versions = {"python": sys.version.split()[0], "qsgd_hpc": __version__}
    for name in _LIBRARIES:
        if found := getattr(sys.modules.get(name), "__version__", None):
            versions[name] = str(found)
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    origin: dict[str, Any] = {
        "time": now.replace("+00:00", "Z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        # Shows other users of the machine: without any, it is about ranks x threads.
        "load": round(os.getloadavg()[0], 1),
        "versions": versions,
    }
    # Only if the script has imported it: importing mpi4py.MPI here would start MPI.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        origin["mpi"] = " ".join(mpi.Get_library_version().replace("\0", "").split())[:200]
    return origin


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
