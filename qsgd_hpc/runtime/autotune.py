"""Autotuning: during the training, rank 0 tries settings of the engine and keeps the fastest.

The result is stored in ``$QSGD_HOME/tuned`` and tried first by the next job with the same site, MPI
and layout of ranks.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsgd_hpc import env
from qsgd_hpc._notices import report, warn
from qsgd_hpc.errors import QsgdError, UsageError
from qsgd_hpc.rules import PLAIN_BITS
from qsgd_hpc.runtime import planning

if TYPE_CHECKING:
    from qsgd_hpc.runtime.basics import Context

__all__ = ["Search", "Settings", "Space", "Tuner", "start_from_environment", "stop"]

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Settings that the engine can change at run time; None leaves a setting unchanged."""

    fusion_bytes: int | None = None
    cycle_time_ms: float | None = None
    algorithm: str | None = None
    bits: int | None = None
    segment_elements: int | None = None


@dataclass(frozen=True)
class Space:
    """Values to try; an empty tuple leaves a setting unchanged.

    Args:
        fusion_mib: smallest and largest size of a fused reduction.
        cycle_time_ms: times to wait for more tensors to fuse.
        algorithms: values of QSGD_ALGORITHM.
        bits: bits per element of compressed gradients.
        segment_elements: elements per message of compressed gradients; 0 is 2^18.
    """

    fusion_mib: tuple[int, int] | tuple[()] = (1, 256)
    cycle_time_ms: tuple[float, ...] = (0.0, 0.5, 1.0, 2.5, 5.0)
    algorithms: tuple[str, ...] = ("auto",)
    bits: tuple[int, ...] = ()
    segment_elements: tuple[int, ...] = ()

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The values of each setting of ``Settings`` that is one of a few."""
        return {
            "cycle_time_ms": self.cycle_time_ms,
            "algorithm": self.algorithms,
            "bits": self.bits,
            "segment_elements": self.segment_elements,
        }


def require_optuna() -> None:
    """Raise a UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "QSGD_AUTOTUNE=1 needs Optuna, which is not installed for rank 0's Python; pip "
            "install 'qsgd-hpc[autotune]', or unset QSGD_AUTOTUNE"
        )


@dataclass
class Search:
    """A search for the fastest settings.

    The same seed, space and speeds give the same trials.

    Args:
        space: the values to try.
        first: settings to try before all others: those in use, and the best of an earlier job.
        seed: seed of the sampler.
        trials: largest number of trials.
        patience: number of trials without a relative gain of ``gain`` that end the search.
    """

    space: Space
    first: tuple[Settings, ...] = ()
    seed: int = 0
    trials: int = 40
    patience: int = 15
    gain: float = 0.02
    best: Settings | None = None
    best_speed: float = 0.0
    trials_done: int = 0
    _since_gain: int = 0
    _study: Any = field(default=None, repr=False)
    _asked: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=8)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        for settings in self.first:
            self._study.enqueue_trial(self._parameters(settings), skip_if_exists=True)

    def _parameters(self, settings: Settings) -> dict[str, Any]:
        """Return the settings that the space contains, by their names in the optimiser."""
        own, fusion = asdict(settings), settings.fusion_bytes
        found = {k: own[k] for k, values in self.space.choices.items() if own[k] in values}
        if self.space.fusion_mib and fusion is not None:
            low, high = self.space.fusion_mib
            found["fusion_mib"] = min(max(fusion // MIB, low), high)
        return found

    @property
    def finished(self) -> bool:
        """Whether the search has ended."""
        return self.trials_done >= self.trials or self._since_gain >= self.patience

    def ask(self) -> Settings:
        """Return the settings to try next."""
        trial = self._asked = self._study.ask()
        chosen: dict[str, Any] = {}
        if self.space.fusion_mib:
            mib = trial.suggest_int("fusion_mib", *self.space.fusion_mib, log=True)
            chosen["fusion_bytes"] = mib * MIB
        for name, values in self.space.choices.items():
            if values:
                chosen[name] = trial.suggest_categorical(name, list(values))
        return Settings(**chosen)

    def tell(self, settings: Settings, speed: float, *, allowed: bool = True) -> None:
        """Record the result of a trial.

        Args:
            settings: the result of ``ask``.
            speed: greater than 0; higher is better.
            allowed: False for settings that must not be kept, however fast.
        """
        self._study.tell(self._asked, speed if allowed else 0.0)
        self.trials_done += 1
        self._since_gain += 1
        if allowed and speed > self.best_speed * (1 + (self.gain if self.best else 0)):
            self._since_gain = 0
        if allowed and speed > self.best_speed:
            self.best, self.best_speed = settings, speed


SCHEMA = 1
_POLL_S = 0.005
# Measurement windows per setting: the first may contain tensors reduced with the previous setting.
_WARM_UP = 1
_MEASURED = 3
_BURSTS = 5  # least number of bursts of gradients (training steps) per window
_COLUMNS = (
    "trial", "elapsed_s", "fusion_bytes", "cycle_time_ms", "algorithm", "bits",
    "segment_elements", "gradient_mb_per_s", "nmse", "kept",
)  # fmt: skip

TRIED_BITS = (2, 4, 8)
TRIED_SEGMENTS = (0, 1 << 14, 1 << 16, 1 << 20)

_tuner: Tuner | None = None


class Stopped(Exception):
    """Raised in the tuner's thread after ``stop``."""


class Tuner:
    """A thread that tries settings on a running engine.

    Args:
        engine: has ``tune(...)``, ``stats()`` and ``quality()``.
        search: the search for settings.
        window_s: least training time of one measurement.
        nmse_budget: error above which settings are rejected; None: no limit.
        log: CSV file with a line for each trial; None: no log.
        on_best: called once with the final settings, unless all were rejected.
    """

    def __init__(
        self,
        engine: Any,
        search: Search,
        *,
        window_s: float = 1.0,
        nmse_budget: float | None = None,
        log: Path | None = None,
        on_best: Callable[[Settings, float], None] | None = None,
    ) -> None:
        self._engine = engine
        self.search = search
        self._window_s = window_s
        self._budget = nmse_budget
        self._log = log
        self._on_best = on_best
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._first: Settings | None = None
        self._thread = threading.Thread(target=self._run, name="qsgd-hpc autotune", daemon=True)

    def start(self) -> None:
        """Start, with an empty log; a UsageError if it cannot be written."""
        if self._log is not None:
            try:
                with self._log.open("w", newline="") as file:
                    csv.writer(file).writerow(_COLUMNS)
            except OSError as error:
                raise UsageError(
                    f"{_cannot_log(self._log, error)}; choose a file in a folder that exists and "
                    "that rank 0's host can write to"
                ) from None
        self._thread.start()

    def stop(self) -> None:
        """Stop; the engine keeps its settings. Does nothing if it has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self.search.finished:
                self._try(self.search.ask())
        except Stopped:
            return
        except (QsgdError, OSError) as error:
            if not self._stop.is_set():
                warn(f"autotuning ended: {error}")
            return
        best = self.search.best
        if best is not None:
            self._apply(best)
            if self._on_best is not None:
                self._on_best(best, self.search.best_speed)
        elif self._first is not None:  # the last ones may be bad in other ways, too
            self._apply(self._first)
            report(
                "warning: autotuning found no settings whose error is within QSGD_NMSE_BUDGET, "
                "and returned to the first; its log (QSGD_AUTOTUNE_LOG) has the errors"
            )

    def _try(self, settings: Settings) -> None:
        self._first = self._first or settings
        self._apply(settings)
        for _ in range(_WARM_UP):
            self._window()
        before = self._reductions()
        speed = statistics.median(self._window() for _ in range(_MEASURED))
        nmse = self._nmse(before)
        allowed = self._budget is None or nmse <= self._budget
        self.search.tell(settings, speed, allowed=allowed)
        self._write(settings, speed, nmse, settings == self.search.best)

    def _apply(self, settings: Settings) -> None:
        values = asdict(settings)
        cycle_time_ms = values.pop("cycle_time_ms")
        if cycle_time_ms is not None:
            values["cycle_time_s"] = cycle_time_ms / 1e3
        self._engine.tune(**{name: value for name, value in values.items() if value is not None})

    def _window(self) -> float:
        """Return gradient bytes per second, between the beginnings of two bursts."""
        while True:
            begin, first = at, count = self._burst()
            longest_s, bursts = 0.0, 0
            while at - begin < self._window_s or bursts < _BURSTS:
                before = at
                at, count = self._burst()
                longest_s, bursts = max(longest_s, at - before), bursts + 1
            if longest_s < (at - begin) / 2:  # else it contains an evaluation or a checkpoint
                return (count - first) / (at - begin)

    def _burst(self) -> tuple[float, float]:
        """Wait until gradients arrive after a pause; return the time and the bytes before them."""
        before = self._bytes()
        idle = False
        began = time.monotonic()
        while True:
            if self._stop.wait(_POLL_S):
                raise Stopped
            count = self._bytes()
            if count == before:
                idle = True
            elif idle or time.monotonic() - began > self._window_s:
                return time.monotonic(), before
            before = count

    def _bytes(self) -> float:
        return float(self._engine.stats()["gradient_bytes"])

    def _reductions(self) -> dict[str, int]:
        """Return the number of reductions of each coded tensor so far."""
        return {name: each["reductions"] for name, each in self._engine.quality().items()}

    def _nmse(self, before: Mapping[str, int]) -> float:
        """Return the largest current coding error of any tensor that was reduced meanwhile.

        The error of a tensor that is no longer reduced is that of other settings.
        """
        qualities = self._engine.quality().items()
        current = [q["nmse"] for name, q in qualities if q["reductions"] > before.get(name, 0)]
        return max(current, default=0.0)

    def _write(self, settings: Settings, speed: float, nmse: float, kept: bool) -> None:
        if self._log is None:
            return
        row = [self.search.trials_done, f"{time.monotonic() - self._began:.1f}", *astuple(settings)]
        try:
            with self._log.open("a", newline="") as file:
                csv.writer(file).writerow([*row, f"{speed / 1e6:.3f}", f"{nmse:.3g}", int(kept)])
        except OSError as error:  # the search goes on, else this trial's settings would stay
            warn(f"{_cannot_log(self._log, error)}; later trials are not logged")
            self._log = None


def _cannot_log(log: Path, error: OSError) -> str:
    return f"the log of autotuning (QSGD_AUTOTUNE_LOG) cannot be written: {log}: {error.strerror}"


def space_from_environment(size: int) -> Space:
    """Return the settings to try: all that the environment does not fix.

    Bits are tried only with QSGD_NMSE_BUDGET, which limits their error, and without QSGD_RULES,
    because they would be those of all tensors.
    """
    coded = env.get("QSGD_BITS") not in (None, 32)
    if env.is_set("QSGD_ALGORITHM", twins=False) or env.get("QSGD_ALGORITHM") != "auto":
        algorithms: tuple[str, ...] = ()
    elif coded:
        # The memory and bytes of gathering all codes grow with the number of ranks.
        algorithms = ("auto", "allgather") if 2 < size <= 4 else ()
    else:
        algorithms = ("auto", "direct", "ring", "rabenseifner")
    budgeted = env.get("QSGD_BITS") in TRIED_BITS and env.get("QSGD_NMSE_BUDGET") is not None
    budgeted = budgeted and not env.is_set("QSGD_RULES")
    return Space(
        fusion_mib=() if env.is_set("QSGD_FUSION_BYTES") else Space.fusion_mib,
        cycle_time_ms=() if env.is_set("QSGD_CYCLE_TIME_MS") else Space.cycle_time_ms,
        algorithms=algorithms,
        bits=TRIED_BITS if budgeted else (),
        segment_elements=(
            TRIED_SEGMENTS if coded and not env.is_set("QSGD_SEGMENT_ELEMENTS") else ()
        ),
    )


def start_from_environment(context: Context) -> None:
    """Start the tuner on rank 0 if QSGD_AUTOTUNE is set; collective.

    Raises:
        UsageError: Optuna is missing, or the log cannot be written (on every rank).
    """
    global _tuner
    if not env.get("QSGD_AUTOTUNE") or context.size == 1:
        return
    fault = None
    if context.rank == 0:
        try:
            require_optuna()
            _tuner = _tuner_of(context)
            _tuner.start()
        except (UsageError, OSError) as error:
            _tuner, fault = None, str(error)
    fault = context.comm.bcast(fault)
    if fault is not None:
        raise UsageError(fault)


def _tuner_of(context: Context) -> Tuner:
    key = planning.Key(
        site=planning.site_name(),
        mpi=context.mpi.library.splitlines()[0][:40],
        ranks=context.size,
        ranks_per_node=context.local_size,
        threads=env.get("QSGD_THREADS"),
    )
    bits = env.get("QSGD_BITS")
    in_use = Settings(
        env.get("QSGD_FUSION_BYTES"),
        env.get("QSGD_CYCLE_TIME_MS"),
        env.get("QSGD_ALGORITHM"),
        bits if bits in (*TRIED_BITS, PLAIN_BITS) else None,
        env.get("QSGD_SEGMENT_ELEMENTS"),
    )
    kept = load(key)
    search = Search(
        space_from_environment(context.size),
        first=(in_use, kept) if kept is not None else (in_use,),
        seed=env.get("QSGD_SEED") % 2**32,
    )
    log = env.get("QSGD_AUTOTUNE_LOG")
    return Tuner(
        context.engine,
        search,
        nmse_budget=env.get("QSGD_NMSE_BUDGET"),
        log=None if log is None else Path(log),
        on_best=lambda best, speed: _keep(key, best, speed),
    )


def stop() -> None:
    """Stop the tuner of this process. Does nothing if there is none."""
    global _tuner
    ended, _tuner = _tuner, None
    if ended is not None:
        ended.stop()


def kept_path(key: planning.Key) -> Path:
    """Return the path of the settings of a site and layout."""
    return key.path.parent.parent / "tuned" / key.path.name


def load(key: planning.Key) -> Settings | None:
    """Return the result of an earlier job, or None."""
    try:
        record = json.loads(kept_path(key).read_text())
        return Settings(**record["settings"]) if record["schema"] == SCHEMA else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(f"{kept_path(key)} is damaged ({error}); autotuning starts from the beginning")
        return None


def save(key: planning.Key, best: Settings, speed: float) -> Path:
    """Store settings for the next job, atomically."""
    record = {"schema": SCHEMA, "key": asdict(key), "settings": asdict(best), "bytes_per_s": speed}
    return planning.store(kept_path(key), record)


def _keep(key: planning.Key, best: Settings, speed: float) -> None:
    words = ", ".join(
        f"{name}={value}" for name, value in asdict(best).items() if value is not None
    )
    report(f"autotuning has ended: {words} reduces {speed / 1e6:.1f} MB of gradients per second")
    planning.keep_by(
        lambda: save(key, best, speed), "autotuning in the next job starts from the beginning"
    )
