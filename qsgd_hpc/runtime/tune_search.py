"""Search for the settings to try next: an Optuna optimiser with ask-and-tell interface."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["Search", "Settings", "Space", "require_optuna"]

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
