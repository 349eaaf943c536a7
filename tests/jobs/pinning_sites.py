"""Profiles of nodes that pinning must get right, as small as can be."""

from __future__ import annotations

from qsgd_hpc.jobs.sites.profile import Cpu, Gpu, Nic, Numa, Site

__all__ = ["EIGHT_GCDS", "FOUR_GPUS", "SITES", "TWELVE_TILES"]

# One socket, four NUMA domains, the GPUs in reverse; the launcher binds cores by --depth.
FOUR_GPUS = Site(
    name="four_gpus",
    description="four GPUs, in reverse",
    scheduler="pbs",
    launcher_argv=("mpiexec", "-n", "{ranks}", "--ppn", "{ranks_per_node}", "--depth={depth}"),
    cores=32,
    hwthreads=64,
    gpus=4,
    gpu=Gpu("CUDA_VISIBLE_DEVICES", ("3", "2", "1", "0")),
    numa=(
        Numa("0-7,32-39", ("3",), ("mlx5_0",)),
        Numa("8-15,40-47", ("2",)),
        Numa("16-23,48-55", ("1",), ("mlx5_1",)),
        Numa("24-31,56-63", ("0",)),
    ),
)
# Eight GPUs that the launcher binds, out of order; the first core of each block is the system's.
EIGHT_GCDS = Site(
    name="eight_gcds",
    description="eight GPUs, bound by the launcher",
    scheduler="slurm",
    launcher_argv=("srun", "-n", "{ranks}", "-c7", "--gpus-per-task=1", "--gpu-bind=closest"),
    cores=56,
    hwthreads=112,
    gpus=8,
    gpu=Gpu("ROCR_VISIBLE_DEVICES", tuple("45236701"), "one", "launcher"),
    cpu=Cpu(tuple(f"{first + 1}-{first + 7}" for first in range(0, 64, 8))),
    numa=tuple(
        Numa(f"{16 * n}-{16 * n + 15},{64 + 16 * n}-{64 + 16 * n + 15}", gpus, (f"hsn{n}",))
        for n, gpus in enumerate((("4", "5"), ("2", "3"), ("6", "7"), ("0", "1")))
    ),
)
# Two sockets with six GPU tiles each; the wrapper does everything.
TWELVE_TILES = Site(
    name="twelve_tiles",
    description="six GPUs of two tiles, two sockets",
    scheduler="pbs",
    launcher_argv=("mpiexec", "-n", "{ranks}", "--ppn", "{ranks_per_node}"),
    cores=104,
    hwthreads=208,
    gpus=12,
    gpu=Gpu("ZE_AFFINITY_MASK", tuple(f"{n // 2}.{n % 2}" for n in range(12)), "one"),
    cpu=Cpu(
        tuple(f"{a}-{a + 3}" for a in (4, 8, 12, 16, 20, 24, 56, 60, 64, 68, 72, 76)), "wrapper"
    ),
    nic=Nic("FI_CXI_DEVICE_NAME", tuple(f"cxi{n}" for n in (0, 0, 1, 1, 2, 2, 4, 4, 5, 5, 6, 6))),
    numa=(
        Numa("0-51,104-155", ("0", "1", "2"), ("cxi0", "cxi1", "cxi2", "cxi3")),
        Numa("52-103,156-207", ("3", "4", "5"), ("cxi4", "cxi5", "cxi6", "cxi7")),
    ),
    local_rank_variables=("MY_LOCAL_RANK",),
)
SITES = {site.name: site for site in (FOUR_GPUS, EIGHT_GCDS, TWELVE_TILES)}
