"""Print where each rank of a job sits: its node, cores, threads and GPUs.

qsgd-hpc run -np 2 show_places.py
"""

import os

import qsgd_hpc.arrays as hvd

# What CUDA, ROCm and Intel's Level Zero look at to see fewer GPUs than there are.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def ranges(numbers: set[int]) -> str:
    """Return numbers as Linux writes lists of processors: 0-3,8."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in pairs)


hvd.init()
place = {
    "rank": hvd.rank(),
    "local": hvd.local_rank(),
    "node": hvd.cross_rank(),
    "CPUs": ranges(os.sched_getaffinity(0)),
    "threads": os.environ.get("OMP_NUM_THREADS", "any"),
    "GPUs": next((os.environ[name] for name in VARIABLES if name in os.environ), "all"),
}
places = hvd.allgather_object(place)
if hvd.rank() == 0:
    for row in (dict(zip(place, place, strict=True)), *places):
        print("  ".join(f"{row[name]!s:<8}" for name in place).rstrip())
