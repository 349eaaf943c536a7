"""Report the actual placement of this rank: cores, NUMA domains, GPUs and network card.

``submit --verify-pinning`` starts this file by its path on every rank, instead of the program, so
it uses the standard library only, and ``python -I -S`` starts it in about 20 ms. It prints one
line, MARK and a JSON object, in one write, so that it does not mix with other ranks' lines.
``qsgd_hpc.jobs.placement.seats`` reads the lines from the job's log. Values that cannot be
determined are absent or null: a tool that is missing, fails or hangs is not an error.

Usage: place.py [--local-rank NAME]... [--launcher NAME] [--show NAME]...
``--local-rank`` names variables that contain the local rank, tried first; ``--launcher`` is the key
in LAUNCHERS of the launcher whose variables are tried next; ``--show`` names further variables to
report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "GPU_VARIABLES",
    "LAUNCHERS",
    "MARK",
    "cpu_list",
    "cpus_of",
    "launchers",
    "main",
    "report",
]

MARK = "qsgd-place "
TOOL_LIMIT_S = 20


def _all_four(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_LOCAL_RANK", f"{prefix}_RANK", f"{prefix}_LOCAL_SIZE", f"{prefix}_SIZE"


# Variables of each launcher: (local rank, rank, local size, size), "" if there is none. Slurm and
# Flux are last: they also set theirs in the batch script, so that ranks of other launchers inherit
# a wrong 0. If the launcher is known, its own variables are tried first.
LAUNCHERS = {
    "pals": ("PALS_LOCAL_RANKID", "PALS_RANKID", "PALS_LOCAL_SIZE", ""),
    "open_mpi": _all_four("OMPI_COMM_WORLD"),
    "jsm": _all_four("JSM_NAMESPACE"),
    "mvapich": _all_four("MV2_COMM_WORLD"),
    "mvapich3": _all_four("MVP_COMM_WORLD"),
    "hydra": ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE"),
    "pmi": _all_four("PMI"),
    "pmix": ("PMIX_LOCAL_RANK", "PMIX_RANK", "", ""),
    "flux": ("FLUX_TASK_LOCAL_ID", "FLUX_TASK_RANK", "", "FLUX_JOB_SIZE"),
    "slurm": ("SLURM_LOCALID", "SLURM_PROCID", "", "SLURM_STEP_NUM_TASKS"),
}
GPU_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)
_OTHER_VARIABLES = (
    *("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_CXI_DEVICE_NAME"),
    "MPICH_OFI_NIC_POLICY",
)
_NODES = "/sys/devices/system/node"
_CPUS = "/sys/devices/system/cpu"


def launchers(first: str | None = None) -> list[tuple[str, str, str, str]]:
    """Return the launchers' variables, those of the given launcher first."""
    return [LAUNCHERS[name] for name in sorted(LAUNCHERS, key=lambda name: name != first)]


def cpu_list(cpus: Iterable[int]) -> str:
    """Return hardware threads in the kernel's notation, such as ``0-7,32-39``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def cpus_of(text: str) -> frozenset[int]:
    """Return the hardware threads of a text such as ``0-7,32-39``; none if it is empty."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def report(
    environ: Mapping[str, str],
    local_rank_names: Iterable[str] = (),
    launcher: str | None = None,
    shown: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the placement of this process, by the keys below."""
    local_ranks, ranks, _, _ = zip(*launchers(launcher), strict=True)
    names = (*GPU_VARIABLES, *_OTHER_VARIABLES, *shown)
    return {
        "rank": _number(environ, ranks),
        "local_rank": _number(environ, (*local_rank_names, *local_ranks)),
        "host": socket.gethostname(),
        "cpus": cpu_list(os.sched_getaffinity(0)),
        "domains": _domains(),
        "siblings": _read(f"{_CPUS}/cpu0/topology/thread_siblings_list"),
        "variables": {name: environ[name] for name in dict.fromkeys(names) if name in environ},
        "gpus": _gpus(),
        "nics": _nics(),
    }


def _number(environ: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Return the first of these variables that is a number."""
    values = (environ.get(name, "") for name in names)
    return next((int(value) for value in values if re.fullmatch("[0-9]+", value)), None)


def _read(path: str) -> str | None:
    try:
        with open(path) as file:  # noqa: PTH123 (pathlib is slow to import)
            return file.read().strip()
    except (OSError, ValueError):
        return None


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []


def _domains() -> dict[str, str]:
    """Return the hardware threads of every NUMA domain that has any."""
    numbers = sorted(int(name[4:]) for name in _names(_NODES) if re.fullmatch(r"node\d+", name))
    texts = {str(number): _read(f"{_NODES}/node{number}/cpulist") for number in numbers}
    return {number: text for number, text in texts.items() if text}


def _domain_of(device: str) -> int | None:
    """Return the NUMA domain from a device's folder in /sys, or None."""
    text = _read(f"{device}/numa_node")
    return int(text) if text and text.isdigit() else None


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs in the order of the vendor's own numbers: bus, uuid, NUMA domain."""
    found = _nvidia() or _amd() or _from_sys()
    for gpu in found:
        gpu["numa"] = _domain_of(f"/sys/bus/pci/devices/{gpu['bus']}")
    return found


def _nvidia() -> list[dict[str, Any]]:
    rows = _output("nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader")
    found = re.findall(r"^(?:[0-9A-Fa-f]{4})?([0-9A-Fa-f:.]{12}), *(\S+)$", rows, re.MULTILINE)
    return [{"bus": bus.lower(), "uuid": uuid} for bus, uuid in found]


def _amd() -> list[dict[str, Any]]:
    try:
        cards = json.loads(_output("rocm-smi", "--showbus", "--showuniqueid", "--json"))
        ordered = sorted(cards.items(), key=lambda item: int(re.sub(r"\D", "", item[0]) or 0))
        return [
            {"bus": card["PCI Bus"].lower(), "uuid": card.get("Unique ID")} for _, card in ordered
        ]
    except (ValueError, KeyError, AttributeError, TypeError):
        return []


def _from_sys() -> list[dict[str, Any]]:
    """Return the GPUs in /sys, in the order of their buses, for machines without the tools."""
    buses = set()
    for name in _names("/sys/class/drm"):
        device = f"/sys/class/drm/{name}/device"
        if name.startswith("renderD") and _read(f"{device}/vendor") in ("0x8086", "0x1002"):
            buses.add(os.path.realpath(device).rsplit("/", 1)[-1])
    return [{"bus": bus, "uuid": None} for bus in sorted(buses)]


def _output(*command: str) -> str:
    import subprocess  # imported here: every rank imports this module in init

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TOOL_LIMIT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def _nics() -> dict[str, int | None]:
    """Return the fast network cards and the NUMA domain of each."""
    folders = ("/sys/class/infiniband", "/sys/class/cxi")
    return {
        name: _domain_of(f"{folder}/{name}/device") for folder in folders for name in _names(folder)
    }


def main(argv: list[str]) -> int:
    """Print this rank's line."""
    given: dict[str, list[str]] = {"--local-rank": [], "--launcher": [], "--show": []}
    for option, name in zip(argv[::2], argv[1::2], strict=True):
        given[option].append(name)
    first = given["--launcher"][-1] if given["--launcher"] else None
    seen = report(os.environ, given["--local-rank"], first, given["--show"])
    # Compact, so that launchers forward it in one piece.
    line = MARK + json.dumps(seen, separators=(",", ":")) + "\n"
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
