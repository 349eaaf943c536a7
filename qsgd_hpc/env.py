"""Every QSGD_* environment variable, in one table: the only place in Python that reads them.

Precedence everywhere: argument, environment, site profile, default. What scripts and job files set
for Horovod (HOROVOD_*) is read where the QSGD_* variable is not set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS, parse_rules

__all__ = ["TABLE", "Twin", "Variable", "flag", "get", "is_set"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def flag(text: str) -> bool:
    """Parse a boolean; anything but 1/0/true/false/yes/no/on/off is a ValueError."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    parse.__doc__ = ", ".join(words)
    return parse


def _at_least(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"expected {parse.__doc__}") from None
        if not least <= value < 2**63:
            raise ValueError(f"expected {parse.__doc__}, and less than 2^63")
        return value

    parse.__doc__ = f"a {'whole ' if kind is int else ''}number of at least {least:g}"
    return parse


def _segment(text: str) -> int:
    """0, or a power of two from 2 to 2^30."""
    if not text.strip().isdecimal() or int(text) not in (0, *(1 << n for n in range(1, 31))):
        raise ValueError("expected a power of two up to 2^30, such as 65536, or 0 (2^18)")
    return int(text)


def _bits(text: str) -> int | str:
    """1 to 8, 32, or auto."""
    word = text.strip().lower()
    if word == AUTO_BITS:
        return AUTO_BITS
    if word not in map(str, (*range(1, 9), PLAIN_BITS)):
        raise ValueError("expected 1 to 8, 32 (plain float32) or auto (as is fastest here)")
    return int(word)


def _weight_bits(text: str) -> int:
    """2 to 8."""
    if text.strip() not in map(str, range(2, 9)):
        raise ValueError("expected 2 to 8")
    return int(text)


def _scheme(text: str) -> str:
    """a code, such as qsgd or topk."""
    from qsgd_hpc.compression import KINDS  # which reads this table

    return _one_of(*KINDS)(text)


def _planner(text: str) -> str:
    """on, off, advise."""
    if text.strip().lower() == "advise":
        return "advise"
    try:
        return "on" if flag(text) else "off"
    except ValueError:
        raise ValueError("expected on, off or advise") from None


def _feedback(text: str) -> bool | None:
    """auto, on, off."""
    if text.strip().lower() == "auto":
        return None
    try:
        return flag(text)
    except ValueError:
        raise ValueError("expected auto, on or off") from None


def _log_level(text: str) -> str:
    """trace, debug, info, warning, error, fatal, off."""
    word = text.strip().lower()
    if word not in LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(LOG_LEVELS)}")
    return word


def _timeline_twin(text: str) -> str | None:
    # Horovod's word for "start_timeline() will be called": here it may be called at any time.
    return None if text == "DYNAMIC" else text


def _hierarchical(text: str) -> str | None:
    return "hierarchical" if flag(text) else None


def _never(text: str) -> float | None:
    return 0.0 if flag(text) else None


def _budget(text: str) -> float:
    """a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError("expected a number above 0")
    return value


@dataclass(frozen=True)
class Twin:
    """Horovod's variable for the same setting.

    Args:
        name: HOROVOD_...
        parse: its text to the value of the QSGD_* variable; None from it leaves that unset.
            Default: as the QSGD_* variable is parsed.
        remark: what a reader of its row should know.
    """

    name: str
    parse: Callable[[str], Any] | None = None
    remark: str = ""


@dataclass(frozen=True)
class Variable:
    """One row: how to parse it, what it is when unset, what it does, and Horovod's names for it.

    The docstring of `parse` says which values there are; docs/settings.md shows it. `horovods` is
    what it is when unset in a script that has imported ``horovod``, where that differs. Those that
    are `of_jobs` are set by ``run`` and the scripts of jobs, and not by users.
    """

    parse: Callable[[str], Any]
    default: Any
    what: str
    twins: tuple[Twin, ...] = ()
    horovods: Any = None
    of_jobs: bool = False


# Those of the core, which this module does not load.
EXACT = (
    "direct", "ring", "recursive_doubling", "rabenseifner", "shared", "hierarchical", "leaders",
)  # fmt: skip
COMPRESSED = ("sra", "sra2d", "allgather", "requantizing_ring", "hierarchical_sra", "leaders_sra")
ALGORITHMS = ("auto", *EXACT, *COMPRESSED)

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal", "off")

TABLE: dict[str, Variable] = {
    "QSGD_BITS": Variable(
        _bits,
        None,
        "bits per gradient element for a DistributedOptimizer that names no compression",
    ),
    "QSGD_WEIGHT_BITS": Variable(
        _weight_bits,
        None,
        "bits per element of the weights that FSDP2 gathers, in scripts that say nothing of it",
    ),
    "QSGD_SCHEME": Variable(
        _scheme,
        None,
        "code for a DistributedOptimizer that names no compression; unset: qsgd",
    ),
    "QSGD_BUCKET_SIZE": Variable(
        _at_least(int, 64), 512, "elements that share one norm; a multiple of 64"
    ),
    "QSGD_NORM": Variable(_one_of("max", "l2"), "max", "norm of a bucket: max or l2"),
    "QSGD_MIN_ELEMENTS": Variable(
        _at_least(int, 0), 1024, "gradients with fewer elements, or one dimension, stay float32"
    ),
    "QSGD_ROUNDING": Variable(
        _one_of("stochastic", "nearest"),
        "stochastic",
        "rounding to levels; nearest is biased",
    ),
    "QSGD_ERROR_FEEDBACK": Variable(
        _feedback, None, "adding what coding lost to the next step: on, off, or auto where needed"
    ),
    "QSGD_RULES": Variable(
        parse_rules, (), "bits of single tensors by name or size: `*.bias=32, embed*=8, >1M=2`"
    ),
    "QSGD_NMSE_BUDGET": Variable(
        _budget, None, "error (NMSE) above which a tensor's bits are raised, at last to float32"
    ),
    "QSGD_SEED": Variable(_at_least(int, 0), 0, "seed of the rounding noise; equal on every rank"),
    "QSGD_ALGORITHM": Variable(
        _one_of(*ALGORITHMS),
        "auto",
        "allreduce of uncompressed gradients, or of compressed ones if it is a compressed one",
        (
            Twin(
                "HOROVOD_HIERARCHICAL_ALLREDUCE",
                _hierarchical,
                "1 asks for `hierarchical` where the ranks of a node share memory",
            ),
        ),
    ),
    "QSGD_PLANNER": Variable(
        _planner,
        "advise",
        "measuring the machine once: on compresses only where that saves time, advise says once "
        "where it costs time",
    ),
    "QSGD_THREADS": Variable(
        _at_least(int, 1), 1, "threads of each rank that code gradients beside the training"
    ),
    "QSGD_GPU_LIBRARY": Variable(
        str, "", "file of GPU kernels to use for the package's own; none: code on the host"
    ),
    "QSGD_FUSION_BYTES": Variable(
        _at_least(int, 0),
        64 << 20,
        "gradient bytes that one fused reduction may hold",
        (Twin("HOROVOD_FUSION_THRESHOLD"),),
    ),
    "QSGD_SEGMENT_ELEMENTS": Variable(
        _segment,
        0,
        "elements that a message of a compressed reduction holds, a power of two; 0: 2^18",
    ),
    "QSGD_CYCLE_TIME_MS": Variable(
        _at_least(float, 0),
        0.0,
        "milliseconds to wait after the first ready tensor for more to fuse with it",
        (Twin("HOROVOD_CYCLE_TIME"),),
    ),
    "QSGD_CACHE_CAPACITY": Variable(
        _at_least(int, 0),
        1024,
        "tensors that ranks announce by number once they have agreed on them; 0: none",
        (Twin("HOROVOD_CACHE_CAPACITY"),),
    ),
    "QSGD_AUTOTUNE": Variable(
        flag,
        False,
        "trying fusion sizes, cycle times and algorithms while training, and keeping the fastest",
        (Twin("HOROVOD_AUTOTUNE"),),
    ),
    "QSGD_AUTOTUNE_LOG": Variable(
        str,
        None,
        "CSV file for what autotuning has tried and measured",
        (Twin("HOROVOD_AUTOTUNE_LOG"),),
    ),
    "QSGD_TIMELINE": Variable(
        str,
        None,
        "file for the timeline of the collectives, which opens in Perfetto",
        (
            Twin(
                "HOROVOD_TIMELINE",
                _timeline_twin,
                "`DYNAMIC` needs no setting: `start_timeline` may always be called",
            ),
        ),
    ),
    "QSGD_TIMELINE_ALL_RANKS": Variable(
        flag, False, "a timeline file for each rank, and one of all, instead of rank 0's alone"
    ),
    "HOROVOD_TIMELINE_MARK_CYCLES": Variable(
        flag, False, "`start_timeline(mark_cycles=True)`, for the timeline of `QSGD_TIMELINE`"
    ),
    "QSGD_NONFINITE": Variable(
        _one_of("error", "warn", "propagate"),
        "error",
        "what a gradient with NaN or Inf does: raise on every rank, warn once, or pass silently",
        horovods="warn",
    ),
    "QSGD_STALL_WARNING_S": Variable(
        _at_least(float, 0),
        60.0,
        "seconds before a tensor that some ranks lack is named; 0: never",
        (
            Twin("HOROVOD_STALL_CHECK_DISABLE", _never, "1 sets it to 0"),
            Twin("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        ),
    ),
    "QSGD_STALL_SHUTDOWN_S": Variable(
        _at_least(float, 0),
        0.0,
        "seconds after which a tensor that some ranks lack ends the job; 0: never",
        (
            Twin("HOROVOD_STALL_CHECK_DISABLE", _never, "1 sets it to 0"),
            Twin("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
        ),
    ),
    "QSGD_DEADLOCK_S": Variable(
        _at_least(float, 0),
        10.0,
        "seconds for which all ranks may wait for different tensors before these fail; 0: for ever",
    ),
    "QSGD_FAN_OUT": Variable(
        _at_least(int, 0),
        0,
        "fan-out, between nodes, of the tree in which ranks agree; 0: a star to 33 ranks, then 8",
    ),
    "QSGD_DYNAMIC_PROCESS_SETS": Variable(
        flag,
        False,
        "permission to add and remove process sets after init",
        (Twin("HOROVOD_DYNAMIC_PROCESS_SETS"),),
    ),
    "QSGD_LOG_LEVEL": Variable(
        _log_level,
        "warning",
        "least serious message of the engine that is printed",
        (Twin("HOROVOD_LOG_LEVEL"),),
    ),
    "QSGD_LIFELINE": Variable(flag, True, "watch the other ranks over TCP, so a dead one is named"),
    "QSGD_RANKS_PER_NODE": Variable(
        _at_least(int, 1), None, "treat each run of so many ranks as one node (simulated nodes)"
    ),
    "QSGD_MPI_ABI": Variable(
        _one_of("int", "pointer"), None, "handle type of an MPI that this package does not know"
    ),
    "QSGD_ELASTIC_CHECKPOINT": Variable(
        str, None, "file to which elastic.run writes each commit, and at which it resumes"
    ),
    "QSGD_RANKS": Variable(
        _at_least(int, 1),
        None,
        "ranks that were started together, which init compares",
        of_jobs=True,
    ),
    "QSGD_ALLOW_SINGLETON": Variable(
        flag,
        False,
        "permission for ranks that were started together, but that MPI did not join, to train "
        "apart",
    ),
    "QSGD_RUN_GRACE_S": Variable(
        _at_least(float, 0), 22.0, "seconds that ranks have to end once one has failed (run)"
    ),
    "QSGD_RUN_FUNCTION": Variable(
        str, None, "where a rank of `qsgd_hpc.run` fetches its function", of_jobs=True
    ),
    "QSGD_DATA": Variable(str, None, "folder that holds the tutorials' data sets"),
    "QSGD_HOME": Variable(str, "~/.qsgd-hpc", "where jobs and measured machines are kept"),
    "QSGD_PLAN_CACHE": Variable(
        flag, True, "plan with what an earlier job of the same site, MPI and layout has measured"
    ),
    "QSGD_JOB_DIR": Variable(str, None, "folder of the job that this process is of", of_jobs=True),
    "QSGD_ATTEMPT": Variable(
        _at_least(int, 0), 0, "jobs of the same training that came before", of_jobs=True
    ),
    "QSGD_SITE": Variable(str, None, "site profile to use instead of detecting one"),
    "QSGD_ACCOUNT": Variable(str, None, "account (project) that pays for submitted jobs"),
    "QSGD_RECORDS": Variable(
        str,
        None,
        "JSON-lines file that qsgd_hpc.scaling.record appends to, and every rank as it leaves",
    ),
}


def is_set(name: str, environ: Mapping[str, str] | None = None, *, twins: bool = True) -> bool:
    """Tell whether the variable, or its twin, is in the environment and not empty."""
    found = os.environ if environ is None else environ
    names = [name, *(twin.name for twin in TABLE[name].twins if twins)]
    return any(found.get(each) for each in names)


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return a variable's parsed value, else its twin's, else its default. Empty is unset.

    Horovod hands NaN and Inf on, and so a script that imports ``horovod`` gets them.

    Raises:
        UsageError: the text cannot be parsed; the message names the variable that was read.
    """
    row = TABLE[name]
    found = os.environ if environ is None else environ
    for source in (Twin(name), *row.twins):
        text = found.get(source.name)
        if not text:
            continue
        try:
            value = (source.parse or row.parse)(text)
        except ValueError as error:
            raise UsageError(f"{source.name}={text!r}: {error}. It sets the {row.what}.") from None
        if value is not None or source.name == name:
            return value
    if row.horovods is not None and "horovod" in sys.modules:
        return row.horovods
    return row.default
