"""The table of all QSGD_* environment variables; the only module in Python that reads them.

Precedence: argument, environment, site profile, default. A HOROVOD_* variable is read if the
QSGD_* variable is not set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS, parse_rules

__all__ = ["TABLE", "Twin", "Variable", "flag", "get", "home", "is_set", "misspelt", "unknown"]

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


def _at_least(
    kind: type[int] | type[float], least: float, *, below: int = 2**63
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"expected {parse.__doc__}") from None
        if not least <= value < below:
            raise ValueError(
                f"expected {parse.__doc__} and below {below if below < 2**63 else '2^63'}"
            )
        return value

    parse.__doc__ = f"{'an integer' if kind is int else 'a number'}, at least {least:g}"
    return parse


def _segment(text: str) -> int:
    """0, or a power of two from 2 to 2^30."""
    if not text.strip().isdecimal() or int(text) not in (0, *(1 << n for n in range(1, 31))):
        raise ValueError("expected a power of two up to 2^30, such as 65536, or 0 (2^18)")
    return int(text)


def _bucket_size(text: str) -> int:
    """a multiple of 64, from 64 to 65536"""
    if not text.strip().isdecimal() or int(text) not in BUCKET_SIZES:
        raise ValueError(f"expected {_bucket_size.__doc__}")
    return int(text)


def _bits(text: str) -> int | str:
    """1 to 8, 32, or auto."""
    word = text.strip().lower()
    if word == AUTO_BITS:
        return AUTO_BITS
    if word not in map(str, (*range(1, 9), PLAIN_BITS)):
        raise ValueError("expected 1 to 8, 32 (plain float32) or auto (the fastest here)")
    return int(word)


def _weight_bits(text: str) -> int:
    """2 to 8."""
    if text.strip() not in map(str, range(2, 9)):
        raise ValueError("expected 2 to 8")
    return int(text)


def _scheme(text: str) -> str:
    """a code, such as qsgd, eden or topk."""
    from qsgd_hpc.compression import KINDS  # imported here, because it imports this module

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
    # In Horovod, DYNAMIC permits later calls of start_timeline(), which are always allowed here.
    return None if text == "DYNAMIC" else text


def _hierarchical(text: str) -> str | None:
    return "hierarchical" if flag(text) else None


def _zero_if_disabled(text: str) -> float | None:
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
        parse: converts its text to the value of the QSGD_* variable, or to None, which leaves
            that unset. Default: the parser of the QSGD_* variable.
        remark: a note for its row in docs/settings.md.
    """

    name: str
    parse: Callable[[str], Any] | None = None
    remark: str = ""


@dataclass(frozen=True)
class Variable:
    """One row: parser, default, description, and Horovod's names for the variable.

    The docstring of `parse` lists the valid values; docs/settings.md shows it. `horovods` is the
    default in a script that has imported ``horovod``, if it differs. Variables with `of_jobs` are
    set by ``run`` and job scripts, not by users.
    """

    parse: Callable[[str], Any]
    default: Any
    what: str
    twins: tuple[Twin, ...] = ()
    horovods: Any = None
    of_jobs: bool = False


BUCKET_SIZES = range(64, (1 << 16) + 1, 64)
"""Elements of a bucket."""

# The algorithms of the core, listed here because this module must not import the core.
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
        "bits per gradient element, if the script sets no compression",
    ),
    "QSGD_WEIGHT_BITS": Variable(
        _weight_bits,
        None,
        "bits per element of the weights that FSDP2 gathers, if the script sets none",
    ),
    "QSGD_SCHEME": Variable(
        _scheme,
        None,
        "code, if the script sets no compression; unset: qsgd",
    ),
    "QSGD_BUCKET_SIZE": Variable(_bucket_size, 512, "elements that share one norm"),
    "QSGD_NORM": Variable(_one_of("max", "l2"), "max", "norm of a bucket: max or l2"),
    "QSGD_MIN_ELEMENTS": Variable(
        _at_least(int, 0), 1024, "gradients with fewer elements, or one dimension, stay float32"
    ),
    "QSGD_ROUNDING": Variable(
        _one_of("stochastic", "nearest"),
        "stochastic",
        "rounding to quantisation levels; nearest is biased",
    ),
    "QSGD_ERROR_FEEDBACK": Variable(
        _feedback, None, "error feedback: on, off, or auto (on if the code needs it)"
    ),
    "QSGD_RULES": Variable(
        parse_rules, (), "bits for tensors by name or size: `*.bias=32, embed*=8, >1M=2`"
    ),
    "QSGD_NMSE_BUDGET": Variable(
        _budget, None, "error (NMSE) above which a tensor gets more bits, up to float32"
    ),
    "QSGD_SEED": Variable(_at_least(int, 0), 0, "seed of the rounding noise; equal on every rank"),
    "QSGD_ALGORITHM": Variable(
        _one_of(*ALGORITHMS),
        "auto",
        "allreduce algorithm; it applies to compressed gradients if it is a compressed algorithm, "
        "else to uncompressed ones",
        (
            Twin(
                "HOROVOD_HIERARCHICAL_ALLREDUCE",
                _hierarchical,
                "1 selects `hierarchical` if the ranks of a node share memory",
            ),
        ),
    ),
    "QSGD_PLANNER": Variable(
        _planner,
        "advise",
        "planner, which measures the machine once: on compresses only if that saves time, advise "
        "warns once if compression costs time",
    ),
    "QSGD_THREADS": Variable(
        _at_least(int, 1, below=1025),
        1,
        "threads per rank that code gradients during the training",
    ),
    "QSGD_GPU_LIBRARY": Variable(
        str, "", "file of GPU kernels instead of the package's; none: code on the host"
    ),
    "QSGD_NCCL": Variable(
        str,
        "auto",
        "library of NCCL or RCCL that carries GPU tensors that are not compressed; auto: the one "
        "that is found; none: they go through the host's memory",
    ),
    "QSGD_FUSION_BYTES": Variable(
        _at_least(int, 0),
        64 << 20,
        "largest number of gradient bytes in one fused reduction",
        (Twin("HOROVOD_FUSION_THRESHOLD"),),
    ),
    "QSGD_SEGMENT_ELEMENTS": Variable(
        _segment,
        0,
        "elements per message of a compressed reduction, a power of two; 0: 2^18",
    ),
    "QSGD_CYCLE_TIME_MS": Variable(
        _at_least(float, 0),
        0.0,
        "milliseconds to wait, after the first ready tensor, for tensors to fuse with it",
        (Twin("HOROVOD_CYCLE_TIME"),),
    ),
    "QSGD_CACHE_CAPACITY": Variable(
        _at_least(int, 0),
        1024,
        "tensors that ranks announce by number instead of name once they are known; 0: none",
        (Twin("HOROVOD_CACHE_CAPACITY"),),
    ),
    "QSGD_AUTOTUNE": Variable(
        flag,
        False,
        "autotuning: trial of fusion sizes, cycle times and algorithms during the training; the "
        "fastest are kept",
        (Twin("HOROVOD_AUTOTUNE"),),
    ),
    "QSGD_AUTOTUNE_LOG": Variable(
        str,
        None,
        "CSV file for the trials of autotuning and their results",
        (Twin("HOROVOD_AUTOTUNE_LOG"),),
    ),
    "QSGD_TIMELINE": Variable(
        str,
        None,
        "file for the timeline of the collectives, for Perfetto",
        (
            Twin(
                "HOROVOD_TIMELINE",
                _timeline_twin,
                "`DYNAMIC` has no effect: `start_timeline` can always be called",
            ),
        ),
    ),
    "QSGD_TIMELINE_ALL_RANKS": Variable(
        flag, False, "a timeline file for each rank and a merged one, instead of rank 0's alone"
    ),
    "HOROVOD_TIMELINE_MARK_CYCLES": Variable(
        flag, False, "`start_timeline(mark_cycles=True)`, for the timeline of `QSGD_TIMELINE`"
    ),
    "QSGD_NONFINITE": Variable(
        _one_of("error", "warn", "propagate"),
        "error",
        "reaction to NaN or Inf in a gradient: raise an error on every rank, warn once, or ignore",
        horovods="warn",
    ),
    "QSGD_STALL_WARNING_S": Variable(
        _at_least(float, 0),
        60.0,
        "seconds until a warning names a tensor that some ranks have not submitted, or ranks that "
        "still run although one has ended (run); 0: never",
        (
            Twin("HOROVOD_STALL_CHECK_DISABLE", _zero_if_disabled, "1 sets it to 0"),
            Twin("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        ),
    ),
    "QSGD_STALL_SHUTDOWN_S": Variable(
        _at_least(float, 0),
        0.0,
        "seconds until a tensor that some ranks have not submitted ends the job; 0: never",
        (
            Twin("HOROVOD_STALL_CHECK_DISABLE", _zero_if_disabled, "1 sets it to 0"),
            Twin("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
        ),
    ),
    "QSGD_DEADLOCK_S": Variable(
        _at_least(float, 0),
        10.0,
        "seconds for which all ranks may wait for different tensors before these fail; 0: no limit",
    ),
    "QSGD_FAN_OUT": Variable(
        _at_least(int, 0, below=2**31),
        0,
        "fan-out between nodes of the engine's tree; 0: a star up to 33 ranks, then 8",
    ),
    "QSGD_DYNAMIC_PROCESS_SETS": Variable(
        flag,
        False,
        "whether process sets can be added and removed after init",
        (Twin("HOROVOD_DYNAMIC_PROCESS_SETS"),),
    ),
    "QSGD_LOG_LEVEL": Variable(
        _log_level,
        "warning",
        "lowest level of the engine's messages that is printed",
        (Twin("HOROVOD_LOG_LEVEL"),),
    ),
    "QSGD_LIFELINE": Variable(flag, True, "detection of dead ranks over TCP"),
    "QSGD_RANKS_PER_NODE": Variable(
        _at_least(int, 1), None, "number of consecutive ranks to treat as one node (for tests)"
    ),
    "QSGD_MPI_ABI": Variable(
        _one_of("int", "pointer"), None, "handle type of an MPI that is not recognised"
    ),
    "QSGD_ELASTIC_CHECKPOINT": Variable(
        str, None, "file to which elastic.run writes each commit, and from which it resumes"
    ),
    "QSGD_RANKS": Variable(
        _at_least(int, 1),
        None,
        "number of ranks that were started together; init checks it",
        of_jobs=True,
    ),
    "QSGD_ALLOW_SINGLETON": Variable(
        flag,
        False,
        "whether ranks that were started together, but that MPI did not connect, may train "
        "separately",
    ),
    "QSGD_RUN_GRACE_S": Variable(
        _at_least(float, 0), 22.0, "seconds that ranks have to end after one has failed (run)"
    ),
    "QSGD_RUN_FUNCTION": Variable(
        str, None, "address from which a rank of `qsgd_hpc.run` fetches its function", of_jobs=True
    ),
    "QSGD_DATA": Variable(str, None, "folder that holds the tutorials' data sets"),
    "QSGD_HOME": Variable(str, "~/.qsgd-hpc", "folder for jobs and for measurements of machines"),
    "QSGD_PLAN_CACHE": Variable(
        flag, True, "reuse of the measurements of earlier jobs with the same site, MPI and layout"
    ),
    "QSGD_JOB_DIR": Variable(str, None, "folder of this process's job", of_jobs=True),
    "QSGD_ATTEMPT": Variable(
        _at_least(int, 0), 0, "number of earlier jobs of the same training", of_jobs=True
    ),
    "QSGD_SITE": Variable(str, None, "site profile to use instead of detecting one"),
    "QSGD_ACCOUNT": Variable(str, None, "account (project) that pays for submitted jobs"),
    "QSGD_RECORDS": Variable(
        str,
        None,
        "JSON Lines file to which qsgd_hpc.scaling.record appends, and every rank when it ends",
    ),
}


OF_BUILDS = (
    "QSGD_BUILD_JOBS",
    "QSGD_CXXFLAGS",
    "QSGD_GPU",
    "QSGD_GPU_TARGETS",
    "QSGD_TEST_MXNET",
    "QSGD_TEST_PYTHON",
)
"""Variables of the build and the tests."""


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the QSGD_* names of the environment that nothing reads, sorted."""
    found = os.environ if environ is None else environ
    known = {*TABLE, *OF_BUILDS}
    return sorted(name for name in found if name.startswith("QSGD_") and name not in known)


def misspelt(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return unknown names that resemble a setting's, with that setting."""
    if not (names := unknown(environ)):
        return {}
    import difflib

    tails = [name.removeprefix("QSGD_") for name in TABLE if name.startswith("QSGD_")]
    near = {n: difflib.get_close_matches(n.removeprefix("QSGD_"), tails, 1, 0.8) for n in names}
    return {name: f"QSGD_{found[0]}" for name, found in near.items() if found}


def is_set(name: str, environ: Mapping[str, str] | None = None, *, twins: bool = True) -> bool:
    """Return whether the variable, or Horovod's, is in the environment and not empty."""
    found = os.environ if environ is None else environ
    names = [name, *(twin.name for twin in TABLE[name].twins if twins)]
    return any(found.get(each) for each in names)


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Return a variable's parsed value, else its Horovod twin's, else the default. Empty is unset.

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
            its = "" if source.name == name else f" It sets {name}."
            raise UsageError(
                f"{source.name}={text!r}: {error}.{its} Meaning: {row.what}."
            ) from None
        if value is not None or source.name == name:
            return value
    if row.horovods is not None and "horovod" in sys.modules:
        return row.horovods
    return row.default


def home() -> Path:
    """Return the absolute path of QSGD_HOME; the folder need not exist.

    Raises:
        UsageError: it is below the user's home, which is unknown, as in a container whose user has
            neither HOME nor an account.
    """
    try:
        return Path(get("QSGD_HOME")).expanduser().absolute()
    except RuntimeError:
        raise UsageError(
            f"QSGD_HOME is {get('QSGD_HOME')}, and the home of this user is unknown. Set HOME, or "
            "set QSGD_HOME to the absolute path of a writable folder."
        ) from None
