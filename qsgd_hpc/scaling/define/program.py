"""One training of a study: a workload of this package, or a script of the user."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.define.case import Case

__all__ = ["Program"]

# The study sets these for every point; a second one after the script would silently override it.
_OWN_OPTIONS = ("--batch-size", "--global-batch-size")
_BATCH_ARGS = {
    "strong": ("--global-batch-size", "{global_batch}"),
    "weak": ("--batch-size", "{rank_batch}"),
}


@dataclass(frozen=True)
class Program:
    """A script and its arguments.

    Attributes:
        workload: name of the shipped workload, or the stem of the user's script.
        script: absolute path.
        framework: "torch" or "keras" for a shipped workload; empty for a user's script.
        args: the script's arguments.
        batch_sizes: samples per step to measure: of all ranks (strong) or of each rank (weak).
        epochs: passed to the script as --epochs; None leaves the script's own default.
        steps: passed to the script as --steps; None: no limit.
        batch_args: the script's arguments for its batch, with {global_batch} and {rank_batch}
            for the samples of all ranks and of one; empty: no arguments. None: by the mode, as
            scripts of this package expect.
        target: the quality for the reported time to target: a perplexity above 1, else a test
            accuracy. None: the quality that all fp32 runs at the largest size reach.
    """

    workload: str
    script: Path
    framework: str = ""
    args: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = (128,)
    epochs: int | None = None
    steps: int | None = None
    batch_args: tuple[str, ...] | None = None
    target: float | None = None

    @property
    def name(self) -> str:
        """A unique name within the study, such as 'resnet34 (torch)'."""
        return f"{self.workload} ({self.framework})" if self.framework else self.workload

    def trains(self, case: Case) -> bool:
        """Return whether a case belongs to this program."""
        return (self.workload, self.framework) == (case.workload, case.framework)

    def cases(
        self, algorithms: tuple[str, ...], networks: tuple[str, ...] = ("",)
    ) -> tuple[Case, ...]:
        """Return the combinations of its batch sizes with the algorithms and the networks."""
        return tuple(
            Case(self.workload, self.framework, batch, algorithm, network)
            for batch in self.batch_sizes
            for algorithm in algorithms
            for network in networks
        )

    def batch_words(self, mode: str, *, global_batch: int, ranks: int) -> list[str]:
        """Return the script's arguments for its batch."""
        words = _BATCH_ARGS[mode] if self.batch_args is None else self.batch_args
        fields = {"global_batch": global_batch, "rank_batch": global_batch // ranks}
        return [word.format(**fields) for word in words]

    @property
    def limits(self) -> dict[str, int]:
        """The script's options that limit a run, as far as the study sets them."""
        given = {"--epochs": self.epochs, "--steps": self.steps}
        return {option: value for option, value in given.items() if value is not None}

    def limit_words(self) -> list[str]:
        """Return the script's arguments for the limits of a run."""
        return [word for option, value in self.limits.items() for word in (option, str(value))]

    def unknown_batch_option(self, mode: str) -> str | None:
        """Return the option for the batch if the script's text does not have it.

        A script that parses its arguments elsewhere may know it, and one that parses none ignores
        it: its speed would be computed from a batch that it does not use.
        """
        if self.batch_args is not None or not self.script.is_file():
            return None
        option = _BATCH_ARGS[mode][0]
        text = self.script.read_bytes().replace(b"_", b"-")
        return None if option.lstrip("-").encode() in text else option

    def faults(self, mode: str, ranks: tuple[int, ...]) -> Iterator[str]:
        """Yield every fault, each with its remedy; `ranks` are those of the sizes to measure."""
        if not self.script.is_file():
            yield f"script {str(self.script)!r}: no such file. Check the path."
        yield from self._batch_faults()
        if self.target is not None and not 0 < self.target < math.inf:
            yield f"--target {self.target:g}: expected a number above 0."
        for option in _OWN_OPTIONS if self.batch_args is None else ():
            if any(a == option or a.startswith(option + "=") for a in self.args):
                yield (
                    f"{option} follows the script, but the study sets the batch of every point. "
                    "Put --batch-size B before the script."
                )
        for option, value in self.limits.items():
            if value < 1:
                yield f"{option} {value}: expected at least 1."
        for batch in self.batch_sizes:
            if batch < 1:
                yield f"--batch-size {batch}: expected at least 1."
            uneven = [n for n in ranks if n >= 1 and batch >= 1 and batch % n]
            if mode == "strong" and uneven:
                several = " and ".join(str(n) for n in uneven)
                yield (
                    f"--batch-size {batch} cannot be shared by {several} ranks ({self.name}). "
                    f"Use a multiple of {uneven[-1]}."
                )

    def _batch_faults(self) -> Iterator[str]:
        try:
            self.batch_words("strong", global_batch=1, ranks=1)
        except (KeyError, IndexError, ValueError):
            yield (
                f"--batch-args {' '.join(self.batch_args or ())!r}: only {{global_batch}} and "
                "{rank_batch} can stand in braces, such as '--bs {rank_batch}'."
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "script": str(self.script)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Program:
        """Create it from the values of :meth:`to_json`; raises KeyError or TypeError for others."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in body.items()
        }
        values["script"] = Path(values["script"])
        return cls(**values)
