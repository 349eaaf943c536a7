"""The settings of one job: read once at init, compared between ranks, converted for the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qsgd_hpc import env
from qsgd_hpc._notices import warn
from qsgd_hpc.compression import from_environment
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime.mpi_binding import holds_everywhere

__all__ = ["Settings", "engine_config", "is_logged", "read", "require_equal", "warn_of_misspelt"]

Settings = dict[str, Any]

# Settings that must be equal on all ranks, or their messages and decisions would differ.
_AGREED = (
    "QSGD_BITS", "QSGD_SCHEME", "QSGD_BUCKET_SIZE", "QSGD_NORM", "QSGD_ROUNDING",
    "QSGD_ERROR_FEEDBACK", "QSGD_RULES", "QSGD_NMSE_BUDGET", "QSGD_MIN_ELEMENTS", "QSGD_SEED",
    "QSGD_ALGORITHM", "QSGD_PLANNER", "QSGD_AUTOTUNE", "QSGD_NONFINITE", "QSGD_RANKS_PER_NODE",
    "QSGD_LIFELINE", "QSGD_NCCL", "QSGD_FUSION_BYTES", "QSGD_CYCLE_TIME_MS",
    "QSGD_SEGMENT_ELEMENTS", "QSGD_CACHE_CAPACITY", "QSGD_STALL_WARNING_S",
    "QSGD_STALL_SHUTDOWN_S", "QSGD_DEADLOCK_S", "QSGD_FAN_OUT", "QSGD_DYNAMIC_PROCESS_SETS",
)  # fmt: skip


def read() -> Settings:
    """Return the settings that must be equal on all ranks, by the names of the variables.

    Raises:
        UsageError: a variable that cannot be parsed.
    """
    return {name: env.get(name) for name in _AGREED}


def require_equal(comm: Any, settings: Settings) -> None:
    """Raise on every rank if the ranks' settings differ; collective over ``comm`` (mpi4py).

    Raises:
        UsageError: every setting that differs, with both values.
    """
    # Settings usually agree; gathering them always would cost each rank all other ranks' settings.
    if holds_everywhere(comm, settings == comm.bcast(settings)):
        return
    everyone = comm.allgather(settings)
    faults = []
    for name in settings:
        for other, theirs in enumerate(everyone):
            if theirs[name] != everyone[0][name]:
                faults.append(
                    f"{name} is {theirs[name]} on rank {other} and {everyone[0][name]} on rank 0. "
                    "Set it for all ranks: qsgd-hpc run --env passes a variable to every host."
                )
                break
    if faults:
        raise UsageError("\n".join(faults))


def warn_of_misspelt() -> None:
    """Warn of variables in the environment whose names resemble settings: they have no effect."""
    if is_logged("warning"):
        for name, meant in env.misspelt().items():
            warn(f"{name} is not a setting and has no effect. Did you mean {meant}?")


def engine_config(
    settings: Settings,
    machine: Any = None,
    measured: Callable[[Any], None] | None = None,
    *,
    shares_memory: bool,
) -> Any:
    """Return the _core.EngineConfig of this rank.

    Args:
        settings: the result of ``read``.
        machine: the _core.Machine to plan for; None: the engine measures it if needed.
        measured: called on rank 0 with the measurement.
        shares_memory: whether the ranks of each node share memory; if not, nodes are not
            reduced first.
    """
    import qsgd_hpc._core as _core
    from qsgd_hpc.runtime import gpu

    algorithm = settings["QSGD_ALGORITHM"]
    if not shares_memory and not env.is_set("QSGD_ALGORITHM", twins=False):
        algorithm = "auto"  # Horovod's variable requires memory that the ranks of a node share
    return _core.EngineConfig(
        seed=settings["QSGD_SEED"],
        fusion_bytes=settings["QSGD_FUSION_BYTES"],
        nonfinite=settings["QSGD_NONFINITE"],
        algorithm=algorithm,
        threads=env.get("QSGD_THREADS"),  # each rank may have its own number
        planner=_planner(settings),
        segment_elements=settings["QSGD_SEGMENT_ELEMENTS"],
        machine=machine,
        measure_at_start=_measures_at_start(settings),
        measured=measured,
        cache_capacity=settings["QSGD_CACHE_CAPACITY"],
        cycle_time_s=settings["QSGD_CYCLE_TIME_MS"] / 1000,
        stall_warning_s=settings["QSGD_STALL_WARNING_S"],
        stall_shutdown_s=settings["QSGD_STALL_SHUTDOWN_S"],
        deadlock_s=settings["QSGD_DEADLOCK_S"],
        fan_out=settings["QSGD_FAN_OUT"],
        gpu_library=gpu.library() or "",  # each rank has the kernels of its own machine
        nccl_library=gpu.nccl(),
        log=warn if is_logged("warning") else None,
    )


def _planner(settings: Settings) -> str:
    # A tuner finds the fastest setting itself.
    if settings["QSGD_AUTOTUNE"] and settings["QSGD_PLANNER"] == "advise":
        return "off"
    return str(settings["QSGD_PLANNER"])


def _measures_at_start(settings: Settings) -> bool:
    # At start, nothing else uses the cores. Compression that the script sets is unknown until its
    # first step.
    planner = _planner(settings)
    chosen = from_environment()
    return planner == "on" or (chosen is not None and (planner == "advise" or chosen.auto_bits))


def is_logged(level: str) -> bool:
    """Return whether QSGD_LOG_LEVEL allows messages of this level."""
    return env.LOG_LEVELS.index(level) >= env.LOG_LEVELS.index(env.get("QSGD_LOG_LEVEL"))
